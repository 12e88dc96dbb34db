"""LayerNorm and the addition before it on NPU: ``npu_add_layer_norm``."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.add_layer_norm import add_layer_norm
from mindspeed_fx.kernels.npu import first, lowering, within
from mindspeed_fx.kernels.npu.layer_norm import _supports

npu, aten = torch.ops.npu, torch.ops.aten


def _parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return (x.new_ones(x.shape[-1]) if weight is None else weight, x.new_zeros(x.shape[-1]) if bias is None else bias)


def _supports_sum(x, residual, weight, bias, eps):
    return first(within("npu_add_layer_norm: dimensions of x", x.dim(), 2, 8), _supports(x, weight, bias))


@lowering(add_layer_norm, "npu_add_layer_norm", _supports_sum, ("npu_add_layer_norm",))
def _add_layer_norm(x, residual, weight, bias, eps):
    y, mean, rstd, s = npu.npu_add_layer_norm(x, residual, *_parameters(x, weight, bias), eps, True)
    return y.contiguous(), s.contiguous(), mean, rstd
