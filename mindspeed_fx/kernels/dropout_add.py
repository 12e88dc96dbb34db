"""Bias, dropout and residual addition in one: ``residual + dropout(x + bias)``.

Source: Megatron-LM's ``bias_dropout_add``; ``npu_dropout_add_layer_norm`` of MindSpeed, whose first half this is. The
random numbers are those of ``aten.native_dropout`` on the same device: with one seed the result is bitwise that of the
unfused eager model, and so the operator runs as one call, never inlined where generated code would draw its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels.base import LIBRARY, operator
from mindspeed_fx.kernels.sharding import along


def _fake(x, bias, residual, p):
    return torch.empty(residual.shape, dtype=residual.dtype, device=x.device), torch.empty_like(
        x if bias is None else x + bias, dtype=torch.bool
    )  # drawn in the order of memory


@operator(
    "dropout_add(Tensor x, Tensor? bias, Tensor residual, float p) -> (Tensor, Tensor)", _fake, opaque=True, random=True
)
def dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """residual + dropout(x + bias, p).

    Args:
        x, residual: [..., hidden], float, same shape and dtype.
        bias: [hidden] of the same dtype, or None.
        p: probability in [0, 1) of an element to become zero; the others are divided by 1 - p.

    Returns:
        the sum [..., hidden], contiguous, and the mask, bool [..., hidden], True where an element was kept.
    """
    dropped, mask = torch.native_dropout(x if bias is None else x + bias, p, True)
    return (residual + dropped).contiguous(), mask


def _setup(ctx, inputs, output):
    _, bias, _, ctx.p = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_mask):
    if grad is None:
        return (None,) * 4
    (mask,) = ctx.saved_tensors
    need_x, need_bias = ctx.needs_input_grad[0], ctx.has_bias and ctx.needs_input_grad[1]
    dx = (
        grad * (mask.to(grad.dtype) * (1 / (1 - ctx.p))) if need_x or need_bias else None
    )  # rounded as eager mode rounds
    return (
        dx if need_x else None,
        dx.flatten(0, -2).sum(0) if need_bias else None,
        grad if ctx.needs_input_grad[2] else None,
        None,
    )


torch.library.register_autograd("mindspeed::dropout_add", _backward, setup_context=_setup, lib=LIBRARY)


@dropout_add.shard
def _sharding_rule(x, bias, residual, p):
    """Each rank draws the numbers of its part."""
    return [([d, d], [d, along(bias, d, x.ndim), d]) for d in range(x.ndim)]


@dropout_add.costs
def _cost(out, x, bias, residual, p):
    """A random number costs about what a special function does."""
    return once(out, x, bias, residual, vector=(SPECIAL + 4) * x.numel)
