"""LayerNorm on NPU: ATen's own operator, and ``npu_add_layer_norm`` for the residual addition before it.

The latter's backward has no meta kernel in torch_npu, so that it serves the forward graph alone; its statistics are
what ``native_layer_norm_backward`` needs.
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.add_layer_norm import _plus_sum, add_layer_norm_backward
from mindspeed_fx.kernels.layer_norm import layer_norm, layer_norm_backward
from mindspeed_fx.kernels.npu import check_types, first, lowering

npu, aten = torch.ops.npu, torch.ops.aten


def _supports(x, weight, bias, *rest):
    return first(check_types(x=x), check_types((x.dtype,), weight=weight, bias=bias))


@lowering(layer_norm, "aten native_layer_norm", _supports)
def _layer_norm(x, weight, bias, eps):
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return y.contiguous(), mean.float(), rstd.float()


def _supports_backward(grad, x, weight, *rest):
    return first(check_types((x.dtype,), grad=grad), _supports(x, weight, None))


@lowering(layer_norm_backward, "aten native_layer_norm_backward", _supports_backward)
def _layer_norm_backward(grad, x, weight, mean, rstd, need_weight, need_bias):
    statistics = mean, rstd
    if x.device.type == "cpu":  # emulated: ATen's CPU kernel has its statistics in the type of x
        statistics = mean.to(x.dtype), rstd.to(x.dtype)
    gamma = x.new_ones(x.shape[-1]) if weight is None and need_bias else weight
    beta = gamma if need_bias else None  # only its shape is read
    dx, dweight, dbias = aten.native_layer_norm_backward(
        grad, x, x.shape[-1:], *statistics, gamma, beta, [True, need_weight, need_bias]
    )
    return (
        dx.contiguous(),
        dweight if need_weight else x.new_empty(0),
        dbias.to(rstd.dtype) if need_bias else rstd.new_empty(0),
    )


lowering(
    add_layer_norm_backward,
    "aten native_layer_norm_backward and addition",
    lambda grad, grad_sum, *rest: _supports_backward(grad, *rest),
)(lambda grad, grad_sum, *rest: _plus_sum(_layer_norm_backward, grad, grad_sum, *rest))
