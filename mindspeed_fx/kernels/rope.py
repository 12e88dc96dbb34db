"""Rotary position embedding: ``y = x * cos + rotate(x) * sin``.

Source: Su et al. 2021, "RoFormer"; ``npu_rotary_mul`` of torch_npu. Two layouts of the rotated pairs: half (GPT-NeoX,
Llama): rotate([a, b]) = [-b, a]; interleaved (GPT-J): rotate(x)[2i] = -x[2i+1], rotate(x)[2i+1] = x[2i].
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.sharding import along


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """The quarter turn of every pair; its transpose, needed backward, is its negative."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _fake(x, cos, sin, interleaved):
    return torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))


@operator("rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor", _fake)
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary position embedding.

    Args:
        x: [..., dim], dim even; any layout of the leading dimensions.
        cos, sin: broadcast against ``x``, last dimension ``dim``.
        interleaved: layout of the pairs.

    Returns:
        the shape and memory layout of ``x``, in the promoted type of ``x`` and ``cos``; computed in float32 for 16-bit
        types.
    """
    dtype = torch.promote_types(x.dtype, cos.dtype)
    wide = x.to(accumulation_dtype(dtype))
    return (wide * cos.to(wide.dtype) + rotate(wide, interleaved) * sin.to(wide.dtype)).to(dtype)


def _fake_backward(grad, x, cos, sin, interleaved, need_angles):
    dx = torch.empty_like(grad, dtype=x.dtype)
    if not need_angles:
        return dx, x.new_empty(0), x.new_empty(0)
    return (
        dx,
        torch.empty(cos.shape, dtype=cos.dtype, device=x.device),
        torch.empty(sin.shape, dtype=sin.dtype, device=x.device),
    )


@operator(
    "rope_backward(Tensor grad, Tensor x, Tensor cos, Tensor sin, bool interleaved, bool need_angles) -> (Tensor, "
    "Tensor, Tensor)",
    _fake_backward,
)
def rope_backward(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, need_angles: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dcos, dsin) of :func:`rope`; the last two are empty unless ``need_angles``.

    dx = grad * cos - rotate(grad * sin); dcos = grad * x and dsin = grad * rotate(x), summed to their shapes.
    """
    g = grad.to(accumulation_dtype(grad.dtype))
    dx = (g * cos.to(g.dtype) - rotate(g * sin.to(g.dtype), interleaved)).to(x.dtype)
    if not need_angles:
        return dx, x.new_empty(0), x.new_empty(0)
    wide = x.to(g.dtype)
    return (
        dx,
        (g * wide).sum_to_size(cos.shape).to(cos.dtype),
        (g * rotate(wide, interleaved)).sum_to_size(sin.shape).to(sin.dtype),
    )


def _setup(ctx, inputs, output):
    x, cos, sin, ctx.interleaved = inputs
    ctx.angles = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    # dx needs cos and sin alone: x is kept only when the angles are trained.
    ctx.save_for_backward(x if ctx.angles else None, cos, sin)
    ctx.dtype = x.dtype


def _backward(ctx, grad):
    x, cos, sin = ctx.saved_tensors
    x = x if ctx.angles else grad.to(ctx.dtype)
    dx, dcos, dsin = torch.ops.mindspeed.rope_backward(grad, x, cos, sin, ctx.interleaved, ctx.angles)
    need = ctx.needs_input_grad
    return dx if need[0] else None, dcos if need[1] else None, dsin if need[2] else None, None


torch.library.register_autograd("mindspeed::rope", _backward, setup_context=_setup, lib=LIBRARY)


@rope.costs
def _cost(out, x, cos, sin, interleaved):
    return once(out, x, cos, sin, vector=3 * x.numel)


@rope_backward.costs
def _backward_cost(out, grad, x, cos, sin, interleaved, need_angles):
    """``x`` is read for the gradients of the angles alone."""
    return once(out, grad, x if need_angles else None, cos, sin, vector=(7 if need_angles else 3) * grad.numel)


@rope.shard
def _sharding_rule(x, cos, sin, interleaved):
    return [([d], [d, along(cos, d, x.ndim), along(sin, d, x.ndim)]) for d in divisible(x, interleaved)]


@rope_backward.shard
def _sharding_rule_backward(grad, x, cos, sin, interleaved, need_angles):
    def angles(t, d):
        own = along(t, d, x.ndim)
        return REPLICATED if not need_angles else PARTIAL if own == REPLICATED else own

    return [
        ([d, angles(cos, d), angles(sin, d)], [d, d, along(cos, d, x.ndim), along(sin, d, x.ndim)])
        for d in divisible(x, interleaved)
    ]


def divisible(x, interleaved):
    """Interleaved pairs are neighbours, so that parts of whole pairs rotate by themselves."""
    return [*range(x.ndim - 1), *([Even(x.ndim - 1, 2)] * interleaved)]


def refuse(x, cos, sin):
    """Why the Triton kernel does not take these; None when it does."""
    if x.shape[-1] > 1024:
        return f"heads of {x.shape[-1]} elements, the kernel takes up to 1024"
    if x.dim() > 4:
        return "more than three leading dimensions"
    if not all(t.stride(-1) == 1 for t in (x, cos, sin)):
        return "the last dimension is not contiguous"
    return triton.refuse_types(x.shape[-1], x=x, cos=cos, sin=sin)


triton.kernel(
    rope,
    _fake,
    "rope.forward",
    "all heads of a token share the angles",
    lambda x, cos, sin, interleaved: refuse(x, cos, sin),
    beats_codegen=False,
)
triton.kernel(
    rope_backward,
    _fake_backward,
    "rope.backward",
    "the rotation the other way",
    lambda grad, x, cos, sin, interleaved, need_angles: (
        "the angles have gradients" if need_angles else refuse(grad, cos, sin)
    ),
    beats_codegen=False,
)
