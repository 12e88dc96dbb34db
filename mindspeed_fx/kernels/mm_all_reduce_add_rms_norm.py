"""The end of a tensor-parallel layer in inference: a product, the sum of it over ranks, the residual, and its RMSNorm.

Source: MindSpeed's ``npu_mm_all_reduce_add_rms_norm``: ``y = all_reduce(x1 x2 + bias) + residual`` and the norm of y.
Of one rank's program, so that it has no sharding rule; for inference, so that it has no gradient.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import Cost, size
from mindspeed_fx.kernels.base import adopt


def sum_over_ranks(x: Tensor, group: str) -> Tensor:
    """``x`` of all ranks of a process group, by its name."""
    importlib.import_module("torch.distributed._functional_collectives")  # registers the operators
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", group))


@torch.library.custom_op("mindspeed::mm_all_reduce_add_rms_norm", mutates_args=())
def mm_all_reduce_add_rms_norm(
    x1: Tensor, x2: Tensor, residual: Tensor, gamma: Tensor, group: str, eps: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The layer's result and its norm.

    Args:
        x1: [..., k], this rank's columns.
        x2: [k, n], its rows.
        residual: [..., n].
        gamma: [n].
        group: the name of the process group.
        bias: [n], added on every rank before the sum, as upstream has it; or None.

    Returns:
        y [..., n], and its RMSNorm times gamma, of the type of ``x1``.
    """
    out = x1 @ x2
    y = sum_over_ranks(out if bias is None else out + bias, group) + residual
    normal, _ = torch.ops.mindspeed.rms_norm(y, gamma, eps, False)
    return y, normal.to(y.dtype)


@mm_all_reduce_add_rms_norm.register_fake
def _(
    x1: Tensor, x2: Tensor, residual: Tensor, gamma: Tensor, group: str, eps: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(residual), torch.empty_like(residual)


layer_end = adopt(torch.ops.mindspeed.mm_all_reduce_add_rms_norm.default, mm_all_reduce_add_rms_norm)


@layer_end.costs
def _cost(out: Any, x1: Any, x2: Any, residual: Any, gamma: Any, group: str, eps: float, bias: Any) -> Cost:
    """Of this device: the product, the sum with the residual and the norm; the messages are the network's."""
    flops = 2 * residual.numel * x2.shape[0]
    return Cost(flops, flops, 7 * residual.numel, size(x1, x2, residual, gamma, bias), size(out), x1.dtype)
