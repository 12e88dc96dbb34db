"""Clipped SwiGLU on NPU: ``npu_fast_gelu`` is the gate of gpt-oss.

``npu_clipped_swiglu`` has no gradient and is documented for inference alone."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.activation import SLOPE
from mindspeed_fx.kernels.clipped_swiglu import _pair, clipped_swiglu, clipped_swiglu_backward
from mindspeed_fx.kernels.npu import check_types, first, lowering, promote_types, within
from mindspeed_fx.kernels.npu.activation import GELU, GELU_BACKWARD

npu, aten = torch.ops.npu, torch.ops.aten

# --------------------------------------------------------------------------- clipped SwiGLU


def _clip(x, up, alpha, limit, offset, interleaved, grad=None):
    return check_types(x=x, up=up, grad=grad)


def _clipped_quick(x, up, alpha, limit, offset, interleaved, grad=None):
    return (
        f"npu_fast_gelu: alpha is {alpha}; valid: {SLOPE}"
        if alpha != SLOPE
        else first(
            _clip(x, up, alpha, limit, offset, interleaved, grad),
            within("npu_fast_gelu: dimensions of x", x.dim(), 1, 8),
        )
    )


def _bound_gates(
    x: Tensor, up: Tensor | None, limit: float, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(gate, up, bounded gate, bounded up) in one type."""
    gate, u = (t.to(promote_types(x, up)) for t in _pair(x, up, interleaved))
    return gate, u, gate.clamp(max=limit), u.clamp(-limit, limit)


def _join(dgate: Tensor, dup: Tensor, x: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    if up is not None:
        return dgate.to(x.dtype).contiguous(), dup.to(up.dtype).contiguous()
    return (torch.stack((dgate, dup), -1).flatten(-2) if interleaved else torch.cat((dgate, dup), -1)).to(
        x.dtype
    ), x.new_empty(0)


def _inside(dgate: Tensor, dup: Tensor, gate: Tensor, u: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return dgate.where(gate <= limit, 0.0), dup.where(u.abs() <= limit, 0.0)


@lowering(clipped_swiglu, "npu_fast_gelu, aten clamps and products", _clipped_quick, GELU)
def _quick_clipped(x, up, alpha, limit, offset, interleaved):
    _, _, g, u = _bound_gates(x, up, limit, interleaved)
    return (npu.npu_fast_gelu(g) * (u + offset)).contiguous()


@lowering(
    clipped_swiglu_backward,
    "npu_fast_gelu and its backward, aten clamps and products",
    lambda grad, *args: _clipped_quick(*args, grad),
    GELU + GELU_BACKWARD,
)
def _quick_clipped_backward(grad, x, up, alpha, limit, offset, interleaved):
    gate, v, g, u = _bound_gates(x, up, limit, interleaved)
    dgate, dup = npu.npu_fast_gelu_backward((grad * (u + offset)).to(g.dtype), g), grad * npu.npu_fast_gelu(g)
    return _join(*_inside(dgate, dup, gate, v, limit), x, up, interleaved)


@lowering(clipped_swiglu, "aten clamps, sigmoid and products", _clip)
def _clipped_swiglu(x, up, alpha, limit, offset, interleaved):
    _, _, g, u = _bound_gates(x, up, limit, interleaved)
    return (g * torch.sigmoid(alpha * g) * (u + offset)).contiguous()


@lowering(clipped_swiglu_backward, "aten clamps, sigmoid and products", lambda grad, *args: _clip(*args, grad))
def _clipped_swiglu_backward(grad, x, up, alpha, limit, offset, interleaved):
    # In float32: the derivative of the sigmoid's product is a difference of close numbers.
    return clipped_swiglu_backward.reference(grad, x, up, alpha, limit, offset, interleaved)
