"""Uniform numbers of a vector that are computed together: those of Inductor, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa
from torch._inductor.utils import fresh_cache, run_and_get_code

MANY = "_mul_epu32("
HAS_VECTORS = isinstance(cpu_vec_isa.pick_vec_isa(), (cpu_vec_isa.VecAVX512, cpu_vec_isa.VecAVX2))


def numbers(x):
    return x + torch.rand(x.shape)


def turned(x):
    """Offsets of one vector lie far from each other."""
    return (torch.rand(x.shape).t() * x.t()).contiguous()


def dropped(x):
    return nn.functional.dropout(x.exp(), 0.3).to(torch.bfloat16)


def several(x):
    """Several seeds, and offsets of which one loop has two kinds."""
    return torch.rand(x.shape) * x + torch.rand(x.shape[1]) - torch.rand(x.shape[0], 1)


@pytest.mark.parametrize("sizes", [(64, 64), (7, 5), (3, 50), (129, 33)], ids=str)
@pytest.mark.parametrize("function", [numbers, turned, dropped, several])
def test_numbers_are_those_of_inductor(function, sizes):
    x = torch.randn(sizes)

    def run(backend):
        torch._dynamo.reset()
        torch.manual_seed(3)
        return run_and_get_code(torch.compile(function, backend=backend, dynamic=False), x)

    with fresh_cache():
        ours, code = run("mindspeed")
        want, plain = run("inductor")
    assert torch.equal(ours, want)
    assert MANY not in "".join(plain), "the rival's code is changed, too"
    assert (MANY in "".join(code)) == HAS_VECTORS


@pytest.mark.skipif(not HAS_VECTORS, reason="this processor has no vectors of 256 bits")
def test_avx2():
    x = torch.randn(33, 40)
    isas = [isa for isa in cpu_vec_isa.valid_vec_isa_list() if type(isa) is cpu_vec_isa.VecAVX2]
    if not isas:
        pytest.skip("this compiler does not build for AVX2")
    torch.manual_seed(5)
    with fresh_cache():
        want = torch.compile(several, backend="inductor", dynamic=False)(x)
        torch._dynamo.reset()
        torch.manual_seed(5)
        with torch._inductor.config.patch({"cpp.simdlen": 256}):
            got, code = run_and_get_code(torch.compile(several, backend="mindspeed", dynamic=False), x)
    assert torch.equal(got, want) and "_mm256_mul_epu32(" in "".join(code)
