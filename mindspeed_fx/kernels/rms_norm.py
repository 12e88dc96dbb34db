"""RMSNorm over the last dimension: ``y = x / sqrt(mean(x^2) + eps) * weight``.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization"; ``npu_rms_norm`` of torch_npu.
Statistics and products are computed in float32 for 16-bit inputs. ``cast_first`` tells where the result returns to
the type of ``x``: before the weight (Llama, Hugging Face) or after it (``torch.nn.RMSNorm``, the NPU kernel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, as_rows, operator


def _result_dtype(x: Tensor, weight: Tensor | None, cast_first: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if weight is not None and cast_first else x.dtype


def _fake(x, weight, eps, cast_first):
    y = torch.empty(x.shape, dtype=_result_dtype(x, weight, cast_first), device=x.device)
    return y, x.new_empty((*x.shape[:-1], 1), dtype=accumulation_dtype(x.dtype))


@operator("rms_norm(Tensor x, Tensor? weight, float eps, bool cast_first) -> (Tensor, Tensor)", _fake, tags=("norm",))
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool) -> tuple[Tensor, Tensor]:
    """RMSNorm.

    Args:
        x: [..., hidden], float.
        weight: [hidden] or None.
        eps: added to the mean square.
        cast_first: return to ``x.dtype`` before multiplying by ``weight``.

    Returns:
        y [..., hidden] contiguous, and rstd [..., 1] in float32 (float64 for float64 inputs).
    """
    wide = x.to(accumulation_dtype(x.dtype))
    rstd = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    y = wide * rstd
    if weight is None:
        return y.to(x.dtype).contiguous(), rstd
    y = y.to(x.dtype) * weight if cast_first else (y * weight.to(wide.dtype)).to(x.dtype)
    return y.contiguous(), rstd


def _fake_backward(grad, x, weight, rstd, cast_first, need_weight):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return dx, torch.empty_like(weight) if need_weight else x.new_empty(0)


@operator(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, bool cast_first, bool need_weight) -> "
    "(Tensor, Tensor)",
    _fake_backward,
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, cast_first: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dweight) of :func:`rms_norm`; dweight is empty unless ``need_weight``.

    With n = x * rstd and h = grad * weight: dx = rstd * (h - n * mean(h * n)), dweight = sum over rows of grad * n.
    """
    wide = x.to(rstd.dtype)
    normal, grad = wide * rstd, grad.to(rstd.dtype)
    h = grad if weight is None else grad * weight.to(rstd.dtype)
    # The sum over rows first: the last reader of x or of the normalized rows can then write dx over them.
    dweight = x.new_empty(0)
    if need_weight:
        rounded = normal.to(x.dtype).to(rstd.dtype) if cast_first else normal
        dweight = as_rows(grad * rounded).sum(0).to(weight.dtype)
    return (rstd * (h - normal * (h * normal).mean(-1, keepdim=True))).to(x.dtype).contiguous(), dweight


def _setup(ctx, inputs, output):
    x, weight, _, ctx.cast_first = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _grad_rstd):
    if grad is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    need_weight = weight is not None and ctx.needs_input_grad[1]
    dx, dweight = torch.ops.mindspeed.rms_norm_backward(grad, x, weight, rstd, ctx.cast_first, need_weight)
    return dx if ctx.needs_input_grad[0] else None, dweight if need_weight else None, None, None


torch.library.register_autograd("mindspeed::rms_norm", _backward, setup_context=_setup, lib=LIBRARY)


@rms_norm.costs
def _cost(out, x, weight, eps, cast_first):
    return once(out, x, weight, vector=5 * x.numel)


@rms_norm_backward.costs
def _backward_cost(out, grad, x, weight, rstd, cast_first, need_weight):
    return once(out, grad, x, weight, rstd, vector=(11 if need_weight else 9) * x.numel)


@rms_norm.shard
def _sharding_rule(x, weight, eps, cast_first):
    return [([d, d], [d, REPLICATED]) for d in range(x.ndim - 1)]


@rms_norm_backward.shard
def _sharding_rule_backward(grad, x, weight, rstd, cast_first, need_weight):
    return [([d, PARTIAL if need_weight else REPLICATED], [d, d, REPLICATED, d]) for d in range(x.ndim - 1)]


triton.kernel(
    rms_norm,
    _fake,
    "rms_norm.forward",
    "one read of a row",
    lambda x, weight, eps, cast_first: triton.refuse(x.shape[-1], x=x, weight=weight),
    beats_codegen=lambda x, *rest: triton.small(x),
)
triton.kernel(
    rms_norm_backward,
    _fake_backward,
    "rms_norm.backward",
    "both gradients in one read of a row",
    lambda grad, x, weight, rstd, cast_first, need_weight: triton.refuse(x.shape[-1], grad=grad, x=x, weight=weight),
    beats_codegen=lambda grad, *rest: triton.small(grad),
)
