"""Cross-entropy of logits on NPU: ``npu_cross_entropy_loss``.

It returns the loss in the type of the logits, so 16-bit logits are widened first, and knows no ignored negative target,
so ignored tokens get class 0 and no share."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.cross_entropy import cross_entropy, cross_entropy_backward
from mindspeed_fx.kernels.npu import check_types, first, lowering, within

npu = torch.ops.npu

LOSS, LOSS_BACKWARD = ("npu_cross_entropy_loss",), ("npu_cross_entropy_loss_backward",)


# --------------------------------------------------------------------------- of logits


def _smoothing(op: str, value: float) -> str | None:
    return f"{op}: label_smoothing is {value}; valid in training: 0" if value else None


def _supports(logits, target, ignore_index, label_smoothing, op="npu_cross_entropy_loss"):
    return first(
        check_types(logits=logits),
        check_types((torch.int64,), target=target),
        within(f"{op}: tokens", logits.shape[0], 1, 200000),
        _smoothing(op, label_smoothing),
    )


def _ignored_tokens(target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Which tokens do not count, and targets that are classes."""
    ignored = target == ignore_index
    return ignored, target.masked_fill(ignored, 0)


@lowering(cross_entropy, "npu_cross_entropy_loss", _supports, LOSS)
def _cross_entropy(logits, target, ignore_index, label_smoothing):
    ignored, classes = _ignored_tokens(target, ignore_index)
    wide = logits.float()
    loss, log_prob, *_ = npu.npu_cross_entropy_loss(wide, classes, None, "none")
    return loss.masked_fill(ignored, 0.0), wide[:, 0] - log_prob[:, 0]


def _supports_backward(grad, logits, target, lse, ignore_index, label_smoothing):
    return _supports(logits, target, ignore_index, label_smoothing, "npu_cross_entropy_loss_backward")


@lowering(cross_entropy_backward, "npu_cross_entropy_loss_backward", _supports_backward, LOSS_BACKWARD)
def _cross_entropy_backward(grad, logits, target, lse, ignore_index, label_smoothing):
    ignored, classes = _ignored_tokens(target, ignore_index)
    log_prob = (logits - lse.unsqueeze(-1)).contiguous()  # float32
    dlogits = npu.npu_cross_entropy_loss_backward(
        grad.masked_fill(ignored, 0.0), log_prob, classes, None, None, None, "none"
    )
    return dlogits.to(logits.dtype)
