"""Products with a transposed left operand on CPU against float64, and how graphs reach them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.compat import cpp, dispatcher
from mindspeed_fx.kernels.cpu import weight_gradient

served = pytest.mark.skipif(cpp.problem() is not None, reason=str(cpp.problem()))
SIZES = st.sampled_from([1, 7, 63, 64, 65, 127, 128, 129, 200, 300])


@pytest.fixture(autouse=True)
def measured_here(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: True)
    yield
    torch.set_num_threads(before)


@served
@settings(max_examples=40, deadline=None)
@given(
    SIZES,
    SIZES,
    st.sampled_from([0, 1, 9, 255, 256, 257, 600]),
    st.sampled_from([1.0, -0.5]),
    st.booleans(),
    st.sampled_from([1, 2, 5]),
)
def test_is_the_product(m, n, k, scale, add, threads):
    torch.set_num_threads(threads)
    a, b, out = torch.randn(k, m), torch.randn(k, n), torch.randn(m, n)
    want = scale * a.double().t() @ b.double() + (out.double() if add else 0)
    have = weight_gradient.weight_gradient(a, b, out, scale, add)
    assert have is out
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5 * max(1, k) ** 0.5)


@served
def test_gemm_of_a_transposed_operand_is_this_kernel():
    a, b = torch.randn(70, 33), torch.randn(70, 140)
    assert torch.equal(torch.ops.mindspeed.gemm(a.t(), b), weight_gradient.weight_gradient(a, b))


def test_what_it_does_not_take_has_a_reason(monkeypatch):
    a, b = torch.randn(8, 4), torch.randn(8, 6)
    assert "float32 on cpu only" in weight_gradient.problem(a.double(), b.double())
    assert "float32 on cpu only" in weight_gradient.problem(a, b.bfloat16())
    assert "not contiguous" in weight_gradient.problem(a, b[:, ::2])
    assert "not contiguous" in weight_gradient.problem(a[:, :2], b)
    monkeypatch.setattr(dispatcher, "onednn_beats_blas", lambda: False)
    assert "other vendors" in weight_gradient.problem(a, b)


@served
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_gradient_of_a_linear_layer_runs_on_it(monkeypatch, dynamic):
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512, bias=False), torch.nn.ReLU(), torch.nn.Linear(512, 256, bias=False)
    )
    calls, run = [], weight_gradient.weight_gradient
    monkeypatch.setattr(weight_gradient, "weight_gradient", lambda *args: calls.append(args[0].shape) or run(*args))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="mindspeed", options={"codegen": "eager"}, dynamic=dynamic)
    for rows in (256, 320):
        x = torch.randn(rows, 256)
        want = torch.autograd.grad(model(x).square().sum(), model.parameters())
        have = torch.autograd.grad(compiled(x).square().sum(), model.parameters())
        for h, w in zip(have, want, strict=True):
            torch.testing.assert_close(h, w, rtol=1e-4, atol=1e-3)
    assert sorted(calls) == sorted([torch.Size([rows, out]) for rows in (256, 320) for out in (512, 256)])
