"""SwiGLU: ``silu(gate) * up``.

Source: Shazeer 2020, "GLU Variants Improve Transformer"; ``npu_swiglu`` of torch_npu, which takes gate and up as the
two halves of one tensor ("packed"). Computed in float32 for 16-bit inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator


def halves(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    return (x, up) if up is not None else x.chunk(2, -1)


def fake(x, up=None):
    if up is not None:
        return torch.empty(x.shape, dtype=torch.promote_types(x.dtype, up.dtype), device=x.device)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@operator("swiglu(Tensor x, Tensor? up=None) -> Tensor", fake, tags=("activation",))
def swiglu(x: Tensor, up: Tensor | None = None) -> Tensor:
    """SwiGLU.

    Args:
        x: gate [..., ffn], or gate and up packed [..., 2 * ffn] when ``up`` is None.
        up: [..., ffn], the shape of the gate, or None.

    Returns:
        [..., ffn], contiguous, in the type of the inputs.
    """
    gate, up = halves(x, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = gate.to(accumulation_dtype(dtype))
    return (wide * torch.sigmoid(wide) * up.to(wide.dtype)).to(dtype).contiguous()


def fake_backward(grad, x, up=None):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, x.new_empty(0) if up is None else torch.empty(up.shape, dtype=up.dtype, device=x.device)


@operator("swiglu_backward(Tensor grad, Tensor x, Tensor? up=None) -> (Tensor, Tensor)", fake_backward)
def swiglu_backward(grad: Tensor, x: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dup) of :func:`swiglu`; packed inputs have one packed gradient and an empty ``dup``.

    With s = sigmoid(gate): dgate = grad * up * s * (1 + gate * (1 - s)), dup = grad * gate * s.
    """
    gate, u = halves(x, up)
    dtype = accumulation_dtype(torch.promote_types(gate.dtype, u.dtype))
    g, wide, u = grad.to(dtype), gate.to(dtype), u.to(dtype)
    s = torch.sigmoid(wide)
    dgate, dup = g * u * s * (1 + wide * (1 - s)), g * (wide * s)
    if up is None:
        return torch.cat((dgate.to(x.dtype), dup.to(x.dtype)), -1), x.new_empty(0)
    return dgate.to(x.dtype).contiguous(), dup.to(up.dtype).contiguous()


def _setup(ctx, inputs, output):
    x, up = inputs
    ctx.save_for_backward(x, up)


def _backward(ctx, grad):
    x, up = ctx.saved_tensors
    dx, dup = torch.ops.mindspeed.swiglu_backward(grad, x, up)
    return dx if ctx.needs_input_grad[0] else None, dup if up is not None and ctx.needs_input_grad[1] else None


torch.library.register_autograd("mindspeed::swiglu", _backward, setup_context=_setup, lib=LIBRARY)


@swiglu.costs
def _cost(out, x, up=None):
    return once(out, x, up, vector=(SPECIAL + 2) * out.numel)


@swiglu_backward.costs
def _backward_cost(out, grad, x, up=None):
    return once(out, grad, x, up, vector=(SPECIAL + 8) * grad.numel)


@swiglu.shard
def gate_strategies(x, up=None, *activation):
    """Packed halves are not divided: a part would hold some of the gate and none of what it gates."""
    return [([d], [d, d]) for d in range(x.ndim - (up is None))]


@swiglu_backward.shard
def ways_backward(grad, x, up=None, *activation):
    return [([d, REPLICATED if up is None else d], [d, d, d]) for d in range(x.ndim - (up is None))]


triton.kernel(
    swiglu,
    fake,
    "glu.forward",
    "one read",
    lambda x, up=None: triton.refuse(x.shape[-1], x=x, up=up),
    beats_codegen=False,
)
triton.kernel(
    swiglu_backward,
    fake_backward,
    "glu.backward",
    "both gradients in one read",
    lambda grad, x, up=None: triton.refuse(x.shape[-1], grad=grad, x=x, up=up),
    beats_codegen=lambda grad, x, up=None: triton.small(x) if up is None else triton.APART,
)
