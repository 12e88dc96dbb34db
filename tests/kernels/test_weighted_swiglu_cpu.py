"""SwiGLU times a weight and its gradients in one pass each, against the definition in float64."""

import pytest
import torch

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels.cpu import weighted_swiglu
from mindspeed_fx.kernels.cpu.attention_flash import TYPES

ops = torch.ops.mindspeed
served = pytest.mark.skipif(cpp.problem() is not None, reason=str(cpp.problem()))


def gate(x, up, weight):
    first, second = (x, up) if up is not None else x.chunk(2, -1)
    return torch.nn.functional.silu(first) * second * weight


def arguments(rows, width, dtype, is_packed, weight_dtype=torch.float32):
    x = torch.randn(*rows, width * (2 if is_packed else 1)) * 4
    up = None if is_packed else torch.randn(*rows, width).to(dtype)
    return torch.randn(*rows, width).to(dtype), x.to(dtype), up, torch.rand(*rows, 1).to(weight_dtype)


def expected(grad, x, up, weight):
    leaves = [t if t is None else t.double().requires_grad_() for t in (x, up, weight)]
    out = gate(*leaves)
    grads = torch.autograd.grad(out, [t for t in leaves if t is not None], grad.double())
    return out, *(grads if up is not None else (grads[0], torch.zeros(0), grads[1]))


@served
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows, width", [((5,), 7), ((2, 3), 513), ((1,), 1024), ((0,), 8), ((3,), 1)])
def test_is_the_product_and_its_gradients(rows, width, dtype, is_packed):
    torch.manual_seed(width)
    args = arguments(rows, width, dtype, is_packed)
    close = {"rtol": 1e-4 if dtype == torch.float32 else torch.finfo(dtype).eps, "atol": 1e-4 * width**0.5}
    for have, want in zip((ops.gate_product(*args[1:]), *ops.gate_gradient(*args)), expected(*args), strict=True):
        torch.testing.assert_close(have.double(), want.double(), **close)


@served
def test_large_gates_nan_and_infinity_are_as_in_the_definition():
    x = torch.tensor([[100.0, -100.0, float("nan"), float("inf"), -88.5, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    args = (torch.ones(1, 6), x, None, torch.ones(1, 1))
    have, want = ops.gate_product(*args[1:]), ops.weighted_swiglu(*args[1:])
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-30, equal_nan=True)
    have, want = ops.gate_gradient(*args), ops.weighted_swiglu_backward(*args)
    torch.testing.assert_close(have[0], want[0], rtol=1e-5, atol=1e-30, equal_nan=True)
    assert have[2].isnan().all() and want[2].isnan().all()


@served
def test_layouts_and_types_of_weights():
    grad, x, up, weight = arguments((6,), 40, torch.bfloat16, False, torch.bfloat16)
    for args in ((grad.t().contiguous().t(), x, up, weight), (grad[:, ::1], x, up.expand(6, 40), weight)):
        for have, want in zip(ops.gate_gradient(*args), ops.weighted_swiglu_backward(*args)):
            assert have.dtype == want.dtype and have.shape == want.shape
            torch.testing.assert_close(have, want)
    assert "one of float32" in weighted_swiglu.problem(x, up, weight, grad.float())
    assert "weights of type" in weighted_swiglu.problem(x, up, weight.double())


def test_sizes_of_other_rows_are_left_to_the_definition():
    """The kernels do not look at sizes: rows that are not there would be read and written."""
    grad, x, _, weight = arguments((8,), 16, torch.float32, True)
    for args in ((x[:2], None, weight), (x, x[:4], weight), (x[:, :31], None, weight[:3])):
        with pytest.raises(RuntimeError, match="must match"):
            ops.gate_product(*args)
        with pytest.raises(RuntimeError, match="must match"):
            ops.gate_gradient(grad, *args)
    with pytest.raises(RuntimeError, match="must match"):
        ops.gate_gradient(grad[:3], x, None, weight)
    torch.testing.assert_close(ops.gate_product(x, None, weight[:1]), gate(x, None, weight[:1]))


@served
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_step_is_these_kernels(dtype, monkeypatch):
    calls, run = [], cpp.call
    monkeypatch.setattr(cpp, "call", lambda name, *args: (calls.append(name), run(name, *args))[1])
    grad, x, _, weight = arguments((12,), 16, dtype, True)
    leaves = x.requires_grad_(), weight.requires_grad_()

    def loss(x, weight):
        return (gate(x, None, weight).to(x.dtype) * grad).sum()

    compiled = torch.compile(loss, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})
    for have, want in zip(*(torch.autograd.grad(f(*leaves), leaves) for f in (compiled, loss))):
        torch.testing.assert_close(have, want, rtol=2e-2, atol=2e-2)
    assert calls == ["gate_product", "gate_gradient"]
