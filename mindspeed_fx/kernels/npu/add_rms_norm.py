"""RMSNorm and the addition before it on NPU: ``npu_add_rms_norm``, which has no derivative in torch_npu and serves the
forward graph.
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.add_rms_norm import add_rms_norm, add_rms_norm_backward
from mindspeed_fx.kernels.npu import check_types, first, lowering, within
from mindspeed_fx.kernels.npu.rms_norm import (
    BACKWARD,
    FORWARD,
    _gamma,
    _rms_norm,
    _rms_norm_backward,
    _supports,
    _supports_backward,
)

npu = torch.ops.npu


def _supports_sum(x, residual, weight, eps, cast_first):
    if weight is not None and weight.dtype != x.dtype:
        return f"npu_add_rms_norm: x is {x.dtype}, gamma {weight.dtype}; valid: one type".replace("torch.", "")
    return first(within("npu_add_rms_norm: dimensions of x", x.dim(), 2, 8), check_types(x=x))


@lowering(add_rms_norm, "npu_add_rms_norm", _supports_sum, ("npu_add_rms_norm",))
def _add_rms_norm(x, residual, weight, eps, cast_first):
    y, rstd, s = npu.npu_add_rms_norm(x, residual, _gamma(x, weight, x.dtype), eps)
    return y.contiguous(), s.contiguous(), rstd


@lowering(
    add_rms_norm,
    "addition and npu_rms_norm",
    lambda x, residual, weight, eps, cast_first: _supports(x, weight, eps, cast_first),
    FORWARD,
)
def _add_then_norm(x, residual, weight, eps, cast_first):
    s = (x + residual).contiguous()
    y, rstd = _rms_norm(s, weight, eps, cast_first)
    return y, s, rstd


def _supports_sum_backward(grad, grad_sum, s, weight, rstd, cast_first, need_weight):
    return _supports_backward(grad, s, weight, rstd, cast_first, need_weight)


@lowering(add_rms_norm_backward, "npu_rms_norm_backward and addition", _supports_sum_backward, BACKWARD)
def _add_rms_norm_backward(grad, grad_sum, s, weight, rstd, cast_first, need_weight):
    ds, dweight = _rms_norm_backward(grad, s, weight, rstd, cast_first, need_weight)
    return ds if grad_sum is None else (ds + grad_sum).contiguous(), dweight
