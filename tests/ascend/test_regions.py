"""Regions of pointwise operators and row reductions: they are cut so that they can run, and their kernels compile for
Ascend.
"""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mindspeed_fx.ascend import kernels, toolchain
from mindspeed_fx.kernels.triton import generate
from mindspeed_fx.partition.regions import graph_of, regions
from tests.kernels import region_cases as cases

MISSING = toolchain.missing("triton_ascend")


def cut(f, *args):
    return make_fx(f, tracing_mode="fake")(*args)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_region_is_what_it_was_cut_from(name):
    (region,) = regions(cases.graph(name))
    given, want = cases.arguments(name), cases.CASES[name][0](*cases.arguments(name))
    have = graph_of(region)(*given)
    for h, w in zip(have, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(h, w, rtol=0, atol=0)
    assert f"in{len(region.inputs) - 1}_ptr" in generate.source(region)


def test_no_region_waits_for_itself():
    """A product, or rows of another width, between two pointwise operators cuts them apart, though they also meet
    directly.
    """

    def f(x, w):
        a = x.exp() * 2
        return (a @ w).relu() * 3 + a

    found = regions(cut(f, torch.randn(4, 8), torch.randn(8, 8)))
    assert [len(r.nodes) for r in found] == [2, 3] and found[0].nodes[-1] in found[1].inputs

    def g(x):
        a = x.exp() * 2
        return torch.cat([a, a], -1).relu().neg(), a.neg() * a

    assert sorted(r.shape for r in regions(cut(g, torch.randn(4, 8)))) == [(4, 8), (4, 16)]


@pytest.mark.parametrize(
    "f, args",
    [
        (lambda x: x.t().exp().neg(), (torch.randn(4, 8),)),
        (lambda x: x.exp().sum(0, keepdim=True).neg(), (torch.randn(4, 1),)),
        (lambda x: (x + 1).neg(), (torch.arange(8).view(2, 4),)),
        (lambda x: x.exp().neg(), (torch.randn(2, 20000),)),
        (lambda x, y: (x * y).exp(), (torch.randn(4, 8), torch.randn(3, 4, 8))),
    ],
)
def test_what_is_no_region(f, args):
    found = regions(cut(f, *args))
    assert (
        not found or all(n.meta["val"].is_contiguous() for r in found for n in (*r.inputs, *r.nodes)) and len(args) == 2
    )


def test_powers_have_no_translation():
    (region,) = regions(cut(lambda x: x.pow(3).neg(), torch.randn(4, 8)))
    with pytest.raises(NotImplementedError, match="a power of 3"):
        generate.source(region)


@pytest.mark.npu
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_kernels_of_regions_compile():
    calls = [kernels.region_call(regions(cases.graph(name))[0]) for name in cases.CASES]
    for row in kernels.compile_kernels(calls, "Ascend910B2")["calls"]:
        assert not row["problem"] and row["operator"].startswith("region of "), row
        (kernel,) = row["kernels"]
        assert kernel["outcome"] == "ok" and kernel["scalar_loops"] == 0 and 0 < kernel["on_chip"]["UB"] <= 192 * 1024
