"""CPU kernel of the addition and LayerNorm of torch_npu."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation
from mindspeed_fx.kernels.npu.emulation.rms_norm import _rstd_shape


def _fake_add_layer_norm(x1, x2, gamma, beta, epsilon=1e-5, additional_output=False):
    stats = (x1.new_empty(_rstd_shape(x1, gamma), dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x1), *stats, torch.empty_like(x1)


@emulation("npu_add_layer_norm", _fake_add_layer_norm)
def npu_add_layer_norm(x1, x2, gamma, beta, epsilon=1e-5, additional_output=False):
    """(y, mean, rstd, x1 + x2), statistics in float32; the last is undefined unless asked for."""
    total = torch.empty_like(x1).copy_(x1 + x2)
    y, mean, rstd = torch.native_layer_norm(total.float(), gamma.shape, gamma.float(), beta.float(), epsilon)
    return torch.empty_like(x1).copy_(y), mean, rstd, total if additional_output else torch.full_like(x1, float("nan"))
