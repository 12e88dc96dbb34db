"""Cross-entropy on NPU.

Of logits: ``npu_cross_entropy_loss``, which returns the loss in the type of the logits, so 16-bit logits are widened
first, and which knows no ignored negative target, so ignored tokens get class 0 and no share. Of a linear layer: the
three operators that torch_npu has for a vocabulary in parts, here with all of it; they keep no logits. What those do
not take (float32, a bias, smoothing, a z-loss, a soft-cap) runs in chunks of logits, whose losses and gradients one
Triton kernel makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.linear_cross_entropy import (
    linear_cross_entropy_tokens,
    linear_cross_entropy_tokens_backward,
    linear_cross_entropy_total,
    linear_cross_entropy_total_backward,
)
from mindspeed_fx.kernels.npu import check_types, first, lowering, within
from mindspeed_fx.kernels.npu.cross_entropy import _ignored_tokens, _smoothing

npu = torch.ops.npu

LINEAR = ("npu_fused_linear_online_max_sum", "npu_fused_cross_entropy_loss_with_max_sum")


LINEAR_BACKWARD = ("npu_fused_linear_online_max_sum", "npu_fused_linear_cross_entropy_loss_with_max_sum_backward")


# --------------------------------------------------------------------------- of a linear layer


def _supports_linear(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, *rest):
    op = LINEAR[0]
    return first(
        check_types((torch.float16, torch.bfloat16), hidden=hidden, weight=weight),
        f"{op}: hidden is {hidden.dtype}, weight {weight.dtype}; valid: one type".replace("torch.", "")
        if hidden.dtype != weight.dtype
        else None,
        check_types((torch.int32, torch.int64), target=target),
        f"{op}: a bias; the kernel has none" if bias is not None else None,
        _smoothing(op, label_smoothing),
        f"{op}: a z-loss of {z_loss}; the kernel has none" if z_loss else None,
        f"{op}: a soft-cap of {softcap}; the kernel has none" if softcap else None,
        within(f"{op}: hidden size", hidden.shape[1], 1, 65534),
        within(f"{LINEAR_BACKWARD[1]}: vocabulary", weight.shape[0], 128, 2**31 - 1),
    )


def _max_sum(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    # The range includes its end. A target that is no class counts as one of another rank's, without an error.
    return npu.npu_fused_linear_online_max_sum(hidden, weight, target, 0, weight.shape[0] - 1)[:5]


def _losses(stats: tuple[Tensor, ...], ignored: Tensor) -> Tensor:
    return npu.npu_fused_cross_entropy_loss_with_max_sum(*stats[:3])[0].masked_fill(ignored, 0.0)


def _gradients(grad: Tensor, hidden: Tensor, weight: Tensor, stats: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    top, total, _, mask, local = stats
    return npu.npu_fused_linear_cross_entropy_loss_with_max_sum_backward(
        grad, hidden, weight, mask, local, 0.0, top, total
    )


@lowering(
    linear_cross_entropy_total,
    "npu_fused_linear_online_max_sum and its loss and backward",
    _supports_linear,
    (*LINEAR, *LINEAR_BACKWARD[1:]),
)
def _total(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, mean, needed):
    ignored, classes = _ignored_tokens(target, ignore_index)
    stats = _max_sum(hidden, weight, classes)
    total = _losses(stats, ignored).sum()
    share = (
        1.0 / (~ignored).sum() if mean else torch.ones((), device=hidden.device)
    )  # without any token: infinity, and a loss of NaN
    empty = hidden.new_empty(0)
    if not any(needed[:2]):
        return total * share, empty, empty, empty
    # float16 gradients of a mean underflow before the loss scale: they are scaled in float32, as the operator saves
    # them.
    late = hidden.dtype == torch.float16
    upstream = torch.ones_like(stats[0]) if late else share.clamp(max=1.0).expand(stats[0].shape)
    upstream = upstream.masked_fill(ignored, 0.0)
    grads = _gradients(upstream, hidden, weight, stats)
    if late:
        grads = tuple(g.float() * share.clamp(max=1.0) for g in grads)
    return total * share, *(g if need else empty for g, need in zip(grads, needed)), empty


@lowering(linear_cross_entropy_total_backward, "aten products", lambda grad, dhidden, dweight, dbias: None)
def _total_backward(grad, dhidden, dweight, dbias):
    return linear_cross_entropy_total_backward.reference(grad, dhidden, dweight, dbias)


@lowering(linear_cross_entropy_tokens, "npu_fused_linear_online_max_sum and its loss", _supports_linear, LINEAR)
def _tokens(hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap):
    ignored, classes = _ignored_tokens(target, ignore_index)
    return _losses(_max_sum(hidden, weight, classes), ignored)


def _supports_tokens_backward(grad, *args):
    return _supports_linear(*args)


@lowering(
    linear_cross_entropy_tokens_backward,
    "npu_fused_linear_online_max_sum and its backward",
    _supports_tokens_backward,
    LINEAR_BACKWARD,
)
def _tokens_backward(grad, hidden, weight, bias, target, ignore_index, label_smoothing, z_loss, softcap, needed):
    ignored, classes = _ignored_tokens(target, ignore_index)
    grads = _gradients(grad.masked_fill(ignored, 0.0), hidden, weight, _max_sum(hidden, weight, classes))
    return *(g if need else hidden.new_empty(0) for g, need in zip(grads, needed)), hidden.new_empty(0)


# ---------- of a linear layer, where torch_npu's operators do not go


def _supports_chunks(hidden, weight, bias, target, *rest):
    return first(
        triton.missing_on_npu(),
        check_types((*triton.DTYPES,), hidden=hidden, weight=weight, bias=bias),
        check_types((torch.int64,), target=target),
    )


CHUNKS = "products and a Triton kernel, chunk by chunk"


for _operator, _supported in (
    (linear_cross_entropy_total, _supports_chunks),
    (linear_cross_entropy_tokens, _supports_chunks),
    (linear_cross_entropy_tokens_backward, lambda grad, *args: _supports_chunks(*args)),
):
    lowering(_operator, CHUNKS, _supported)(_operator.overload)
