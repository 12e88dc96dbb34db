"""Scaled, masked softmax on NPU: ``npu_scaled_masked_softmax`` and its backward."""

from __future__ import annotations

import torch

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels.npu import check_types, first, lowering, within
from mindspeed_fx.kernels.scaled_masked_softmax import scaled_masked_softmax, scaled_masked_softmax_backward

npu = torch.ops.npu


def _supports(x, mask, scale, op="npu_scaled_masked_softmax"):
    def side(name, size):
        return first(
            within(f"{op}: {name}", size, 32, 4096),
            f"{op}: {name} is {hint(size)}; valid: multiples of 32" if hint(size) % 32 else None,
        )

    return first(
        check_types(x=x),
        check_types((torch.bool,), mask=mask),
        within(f"{op}: dimensions of x", x.dim(), 4, 4),
        within(f"{op}: dimensions of the mask", mask.dim(), 4, 4),
        side("rows", x.shape[-2]),
        side("columns", x.shape[-1]),
    )


@lowering(scaled_masked_softmax, "npu_scaled_masked_softmax", _supports, ("npu_scaled_masked_softmax",))
def _softmax(x, mask, scale):
    return npu.npu_scaled_masked_softmax(x, mask, scale, False).contiguous()


def _supports_backward(grad, y, mask, scale):
    return check_types((y.dtype,), grad=grad) or _supports(y, mask, scale, "npu_scaled_masked_softmax_backward")


@lowering(
    scaled_masked_softmax_backward,
    "npu_scaled_masked_softmax_backward",
    _supports_backward,
    ("npu_scaled_masked_softmax_backward",),
)
def _softmax_backward(grad, y, mask, scale):
    return npu.npu_scaled_masked_softmax_backward(grad, y, mask, scale, False).contiguous()
