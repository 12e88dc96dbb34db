"""Gates and activations of infinities, NaN and numbers that overflow: what eager PyTorch gives, they give."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import mindspeed_fx.backend  # noqa: F401  registers the operators
from mindspeed_fx.kernels.cpu import weighted_swiglu  # noqa: F401  registers its operators

ops = torch.ops.mindspeed
NUMBERS = [-float("inf"), -1e30, -100.0, -2.0, -0.0, 0.0, 0.5, 3.0, 1e30, float("inf"), float("nan")]
GRID = torch.tensor(list(itertools.product(NUMBERS, NUMBERS, NUMBERS)))
"""[1331, 3]: gate, up, gradient from above."""


def swish(slope):
    return lambda gate: gate * torch.sigmoid(slope * gate)


GATES = {
    "reglu": (lambda gate, up: F.relu(gate) * up, lambda gate, up: ops.glu(gate, up, "relu")),
    "glu": (lambda gate, up: torch.sigmoid(gate) * up, lambda gate, up: ops.glu(gate, up, "sigmoid")),
    "geglu": (lambda gate, up: F.gelu(gate) * up, lambda gate, up: ops.glu(gate, up, "gelu")),
    "swiglu": (lambda gate, up: F.silu(gate) * up, ops.swiglu),
    "clipped_swiglu": (
        lambda gate, up: swish(1.702)(gate.clamp(max=7)) * (up.clamp(-7, 7) + 1),
        lambda gate, up: ops.clipped_swiglu(gate, up, 1.702, 7.0, 1.0, False),
    ),
    "squared_relu": (
        lambda gate, up: F.relu(gate).square() * up,
        lambda gate, up: ops.activation(gate, "squared_relu") * up,
    ),
    "quick_gelu": (
        lambda gate, up: swish(1.702)(gate) * up,
        lambda gate, up: ops.activation(gate, "quick_gelu") * up,
    ),
}


def with_gradients(function, dtype):
    gate, up, grad = (t.to(dtype) for t in GRID.unbind(1))
    gate, up = gate.requires_grad_(), up.requires_grad_()
    y = function(gate, up)
    return y.detach(), *torch.autograd.grad(y, (gate, up), grad)


def wrong(have, want, tolerance):
    """What of the grid is another number, or NaN where ``want`` is a number; NaN of eager's may become numbers where it
    is of 0 times infinity on the way."""
    near = (have == want) | ((have - want).abs() <= tolerance * want.abs())
    return GRID[~(near | want.isnan())].tolist()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("gate", GATES)
def test_a_gate(gate, dtype, tolerance):
    plain, operator = GATES[gate]
    for have, want in zip(with_gradients(operator, dtype), with_gradients(plain, dtype), strict=True):
        assert not wrong(have, want, tolerance)[:5]
        if gate == "reglu":
            assert torch.equal(have.isnan(), want.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_times_a_weight_in_cpp(dtype):
    """Rows of one element, the weight 1."""
    gate, up, grad = (t.to(dtype).reshape(-1, 1) for t in GRID.unbind(1))
    weight = torch.ones(len(GRID), 1)
    want = with_gradients(lambda gate, up: F.silu(gate) * up, dtype)
    have = ops.gate_product(gate, up, weight), *ops.gate_gradient(grad, gate, up, weight)[:2]
    for h, w in zip(have, want, strict=True):
        # The factor of a gate below -87 is 0, which is 1e-36 of eager's.
        assert not wrong(h.flatten(), w, 0.03)[:5]


def test_a_clamp_on_npu_passes_what_clamp_passes():
    from mindspeed_fx.kernels.npu.clipped_swiglu import _inside

    x = torch.tensor(NUMBERS, requires_grad=True)
    ones = torch.ones(len(NUMBERS))
    want = [torch.autograd.grad(y, x, ones)[0] for y in (x.clamp(max=2.5), x.clamp(-2.5, 2.5))]
    have = _inside(ones, ones, x.detach(), x.detach(), 2.5)
    assert all(torch.equal(h, w) for h, w in zip(have, want, strict=True))
