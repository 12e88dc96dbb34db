"""Residual addition and RMSNorm in one: ``s = x + residual``, ``y = rms_norm(s) * weight``; both are results.

Source: ``npu_add_rms_norm`` of torch_npu; see :mod:`mindspeed_fx.kernels.rms_norm` for the norm itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, operator
from mindspeed_fx.kernels.rms_norm import rms_norm, rms_norm_backward


def _fake(x, residual, weight, eps, cast_first):
    s = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y, rstd = torch.ops.mindspeed.rms_norm(s, weight, eps, cast_first)
    return y, s, rstd


@operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool cast_first) -> (Tensor, Tensor, Tensor)",
    _fake,
    tags=("norm",),
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """RMSNorm of a sum.

    Args:
        x, residual: [..., hidden], float, same shape and dtype.
        weight: [hidden] or None.
        eps: added to the mean square.
        cast_first: return to ``x.dtype`` before multiplying by ``weight``.

    Returns:
        y [..., hidden], x + residual [..., hidden], both contiguous, and rstd [..., 1] in float32 (float64 for
        float64).
    """
    s = (x + residual).contiguous()
    y, rstd = rms_norm.reference(s, weight, eps, cast_first)
    return y, s, rstd


def _fake_backward(grad, grad_sum, s, weight, rstd, cast_first, need_weight):
    return torch.empty(s.shape, dtype=s.dtype, device=s.device), torch.empty_like(
        weight
    ) if need_weight else s.new_empty(0)


@operator(
    "add_rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor s, Tensor? weight, Tensor rstd, bool cast_first, bool "
    "need_weight) -> (Tensor, Tensor)",
    _fake_backward,
)
def add_rms_norm_backward(grad, grad_sum, s, weight, rstd, cast_first, need_weight):
    """Gradient of both summands, with ``grad_sum`` that of the sum where it is used elsewhere, and dweight, which is
    empty unless ``need_weight``."""
    ds, dweight = rms_norm_backward.reference(grad, s, weight, rstd, cast_first, need_weight)
    return ds if grad_sum is None else (ds + grad_sum).contiguous(), dweight


def _setup(ctx, inputs, output):
    weight, ctx.cast_first = inputs[2], inputs[4]
    ctx.save_for_backward(output[1], weight, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_sum, _grad_rstd):
    s, weight, rstd = ctx.saved_tensors
    need_weight = weight is not None and ctx.needs_input_grad[2]
    if grad is None:
        ds, dweight, need_weight = grad_sum, None, False
    else:
        ds, dweight = torch.ops.mindspeed.add_rms_norm_backward(
            grad, grad_sum, s, weight, rstd, ctx.cast_first, need_weight
        )
    return *(ds if need else None for need in ctx.needs_input_grad[:2]), dweight if need_weight else None, None, None


torch.library.register_autograd("mindspeed::add_rms_norm", _backward, setup_context=_setup, lib=LIBRARY)


@add_rms_norm.costs
def _cost(out, x, residual, weight, eps, cast_first):
    return once(out, x, residual, weight, vector=6 * x.numel)


@add_rms_norm_backward.costs
def _backward_cost(out, grad, grad_sum, s, weight, rstd, cast_first, need_weight):
    return once(out, grad, grad_sum, s, weight, rstd, vector=(12 if need_weight else 10) * s.numel)


@add_rms_norm.shard
def _sharding_rule(x, residual, weight, eps, cast_first):
    return [([d, d, d], [d, d, REPLICATED]) for d in range(x.ndim - 1)]


@add_rms_norm_backward.shard
def _sharding_rule_backward(grad, grad_sum, s, weight, rstd, cast_first, need_weight):
    return [([d, PARTIAL if need_weight else REPLICATED], [d, d, d, REPLICATED, d]) for d in range(s.ndim - 1)]


triton.kernel(
    add_rms_norm,
    _fake,
    "add_rms_norm.forward",
    "one read of a row",
    lambda x, residual, weight, eps, cast_first: triton.refuse(x.shape[-1], x=x, residual=residual, weight=weight),
    beats_codegen=False,
)
triton.kernel(
    add_rms_norm_backward,
    _fake_backward,
    "add_rms_norm.backward",
    "all gradients in one read of a row",
    lambda grad, grad_sum, s, weight, rstd, cast_first, need_weight: triton.refuse(
        s.shape[-1], grad=grad, grad_sum=grad_sum, s=s, weight=weight
    ),
    beats_codegen=lambda grad, *rest: triton.small(grad),
)
