"""``residual + dropout(x + bias)`` whose mask is a function of a seed and of the place in the tensor: it is drawn,
never stored.

Forward and backward draw the same mask from the same two numbers, so nothing of the size of ``x`` is saved. The numbers
are of the distribution of the model's dropout but not the same, so that only targets take this operator
(passes/lowering/dropout.py) whose own dropout draws numbers of its own too. Source: Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3" (a counter, not a state); the mixing of 32-bit words is that of C. Wellons's
hash-prospector. Products, shifts and exclusive-or of 32-bit integers are vector operations on Ascend, which the 64-bit
products of Philox are not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, operator
from mindspeed_fx.kernels.sharding import along

WORD, LEVELS = 2**32 - 1, 2**24
"""Mask of 32 bits; how many values a drawn number has, all of them exact in float32."""
FIRST, SECOND = 0x2C1B3C6D, 0x297A2D39
DRAWN = 22
"""Vector FLOP of one number: two products, and three shifts and four exclusive-ors of several operations each on
Ascend.
"""


def draw_levels(shape: torch.Size, seed: Tensor) -> Tensor:
    """int64 tensor of ``shape``, uniform in [0, :data:`LEVELS`): the number of element i, counted in row-major order
    modulo 2**32.

    Args:
        seed: [2], int32, non-negative.
    """
    low, high = seed.to(torch.int64).unbind()
    x = (torch.arange(shape.numel(), device=seed.device) & WORD) ^ low
    x = ((x ^ (x >> 15)) * FIRST + high) & WORD
    x = ((x ^ (x >> 12)) * SECOND) & WORD
    return ((x ^ (x >> 15)) >> 8).view(shape)


def threshold(p: float) -> int:
    """Numbers below it are dropped: the share ``p`` of them, to 6e-8."""
    return round(p * LEVELS)


def _fake(x, bias, residual, seed, p):
    return torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)


@operator("dropout_add_seeded(Tensor x, Tensor? bias, Tensor residual, Tensor seed, float p) -> Tensor", _fake)
def dropout_add_seeded(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    """residual + keep * (x + bias) / (1 - p), computed in float32 for 16-bit inputs.

    Args:
        x, residual: [..., hidden], float, same shape and dtype.
        bias: [hidden] of the same dtype, or None.
        seed: [2], int32, drawn below 2**31 - 1 by torch's generator.
        p: probability in [0, 1) of an element to become zero.

    Returns:
        [..., hidden], contiguous, in the dtype of ``residual``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
    kept = torch.where(draw_levels(x.shape, seed) >= threshold(p), y * (1 / (1 - p)), 0.0)
    return (residual.to(wide) + kept).to(residual.dtype).contiguous()


def _fake_backward(grad, seed, p):
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)


@operator("dropout_add_seeded_backward(Tensor grad, Tensor seed, float p) -> Tensor", _fake_backward)
def dropout_add_seeded_backward(grad: Tensor, seed: Tensor, p: float) -> Tensor:
    """Gradient [..., hidden] of ``x``, contiguous; its sum over rows is that of the bias, and ``grad`` that of the
    residual.
    """
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return (
        torch.where(draw_levels(grad.shape, seed) >= threshold(p), wide * (1 / (1 - p)), 0.0)
        .to(grad.dtype)
        .contiguous()
    )


def _setup(ctx, inputs, output):
    _, bias, _, seed, ctx.p = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(seed)


def _backward(ctx, grad):
    (seed,) = ctx.saved_tensors
    need_x, need_bias = ctx.needs_input_grad[0], ctx.has_bias and ctx.needs_input_grad[1]
    dx = torch.ops.mindspeed.dropout_add_seeded_backward(grad, seed, ctx.p) if need_x or need_bias else None
    return (
        dx if need_x else None,
        dx.flatten(0, -2).sum(0) if need_bias else None,
        grad if ctx.needs_input_grad[2] else None,
        None,
        None,
    )


torch.library.register_autograd("mindspeed::dropout_add_seeded", _backward, setup_context=_setup, lib=LIBRARY)


@dropout_add_seeded.shard
def _sharding_rule(x, bias, residual, seed, p):
    """Whole alone where it draws: the number of an element is a function of its place in the whole tensor."""
    return [] if p else [([d], [d, along(bias, d, x.ndim), d, REPLICATED]) for d in range(x.ndim)]


@dropout_add_seeded_backward.shard
def _sharding_rule_backward(grad, seed, p):
    return [] if p else [([d], [d, REPLICATED]) for d in range(grad.ndim)]


@dropout_add_seeded.costs
def _cost(out, x, bias, residual, seed, p):
    return once(out, x, bias, residual, seed, vector=(DRAWN + 4) * x.numel)


@dropout_add_seeded_backward.costs
def _backward_cost(out, grad, seed, p):
    return once(out, grad, seed, vector=(DRAWN + 2) * grad.numel)


triton.kernel(
    dropout_add_seeded,
    _fake,
    "dropout_add_seeded.forward",
    "mask drawn in place",
    lambda x, bias, residual, seed, p: triton.refuse(x.shape[-1], x=x, bias=bias, residual=residual),
    beats_codegen=False,
)
triton.kernel(
    dropout_add_seeded_backward, _fake_backward, "dropout_add_seeded.backward", "mask drawn again",
    lambda grad, seed, p: triton.refuse(grad.shape[-1], grad=grad), beats_codegen=False,
)  # fmt: skip
