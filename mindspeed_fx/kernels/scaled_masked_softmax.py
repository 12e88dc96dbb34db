"""Scaled, masked softmax: ``softmax(mask(scale * x))`` over the last dimension, for attention whose weights must exist.

Source: Megatron-LM's ``FusedScaleMaskSoftmax``; ``npu_scaled_masked_softmax`` of torch_npu. A masked score becomes
-10000, as in Megatron: a row that is masked whole is uniform. The backward keeps the result alone. Computed in float32
for 16-bit inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import SOFTMAX, once
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator
from mindspeed_fx.kernels.sharding import along

FILL = -10000.0


def _fake(x, mask, scale):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operator("scaled_masked_softmax(Tensor x, Tensor mask, float scale) -> Tensor", _fake)
def scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(mask(scale * x)).

    Args:
        x: [batch, heads, q_seq, kv_seq], float.
        mask: bool, True where masked; 4 dimensions that broadcast to those of ``x``.
        scale: factor on x.

    Returns:
        The weights, in the shape and type of ``x``, contiguous.
    """
    wide = x.to(accumulation_dtype(x.dtype)) * scale
    return torch.softmax(wide.masked_fill(mask, FILL), -1).to(x.dtype).contiguous()


@operator(
    "scaled_masked_softmax_backward(Tensor grad, Tensor y, Tensor mask, float scale) -> Tensor",
    lambda grad, y, mask, scale: _fake(y, mask, scale),
)
def scaled_masked_softmax_backward(grad: Tensor, y: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Gradient of :func:`scaled_masked_softmax` for x: scale * y * (grad - sum(grad * y)), zero where masked."""
    g, p = (t.to(accumulation_dtype(y.dtype)) for t in (grad, y))
    dx = scale * p * (g - (g * p).sum(-1, keepdim=True))
    return dx.masked_fill(mask, 0.0).to(y.dtype).contiguous()


def _setup(ctx, inputs, output):
    _, mask, ctx.scale = inputs
    ctx.save_for_backward(output, mask)


def _backward(ctx, grad):
    return torch.ops.mindspeed.scaled_masked_softmax_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


torch.library.register_autograd("mindspeed::scaled_masked_softmax", _backward, setup_context=_setup, lib=LIBRARY)


@scaled_masked_softmax.shard
def _sharding_rule(x, mask, scale):
    return [([d], [d, along(mask, d, x.ndim)]) for d in range(x.ndim - 1)]


@scaled_masked_softmax_backward.shard
def _sharding_rule_backward(grad, y, mask, scale):
    return [([d], [d, d, along(mask, d, y.ndim)]) for d in range(y.ndim - 1)]


@scaled_masked_softmax.costs
def _cost(out, x, mask, scale):
    return once(out, x, mask, vector=(SOFTMAX + 2) * x.numel)


@scaled_masked_softmax_backward.costs
def _backward_cost(out, grad, y, mask, scale):
    return once(out, grad, y, mask, vector=6 * y.numel)
