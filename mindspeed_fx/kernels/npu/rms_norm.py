"""RMSNorm, alone and with the addition before it, on NPU.

``npu_rms_norm`` multiplies by gamma in float32 and rounds once, wherever the model rounds; x and gamma have one type,
so that mixed types are widened first. ``npu_add_rms_norm`` has no derivative in torch_npu: it serves the forward graph,
after autograd, and its three results are what ``npu_rms_norm_backward`` needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.npu import check_types, first, lowering, promote_types, within
from mindspeed_fx.kernels.rms_norm import rms_norm, rms_norm_backward

npu = torch.ops.npu

FORWARD, BACKWARD = ("npu_rms_norm",), ("npu_rms_norm_backward",)


def _supports(x, weight, eps, cast_first):
    return first(within("npu_rms_norm: dimensions of x", x.dim(), 2, 8), check_types(x=x, weight=weight))


def _gamma(x: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) if weight is not None else torch.ones(x.shape[-1], dtype=dtype, device=x.device)


@lowering(rms_norm, "npu_rms_norm", _supports, FORWARD)
def _rms_norm(x, weight, eps, cast_first):
    wide = promote_types(x, weight)
    y, rstd = npu.npu_rms_norm(x.to(wide), _gamma(x, weight, wide), eps)
    return y.to(wide if cast_first else x.dtype).contiguous(), rstd


def _supports_backward(grad, x, weight, rstd, cast_first, need_weight):
    return first(_supports(x, weight, 0.0, cast_first), check_types(grad=grad))


@lowering(rms_norm_backward, "npu_rms_norm_backward", _supports_backward, BACKWARD)
def _rms_norm_backward(grad, x, weight, rstd, cast_first, need_weight):
    wide = promote_types(x, weight)
    dx, dgamma = npu.npu_rms_norm_backward(grad.to(wide), x.to(wide), _gamma(x, weight, wide), rstd)
    # dgamma is float32 whatever gamma is
    return dx.to(x.dtype).contiguous(), dgamma.to(weight.dtype) if need_weight else x.new_empty(0)
