"""Several products summed over ranks by one collective, for inference.

Source: MindSpeed's ``npu_grouped_mat_mul_all_reduce``: ``y_i = all_reduce(x_i w_i) + bias_i``. Of one rank's program,
so that it has no sharding rule; for inference, so that it has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import Cost, size
from mindspeed_fx.kernels.base import adopt
from mindspeed_fx.kernels.mm_all_reduce_add_rms_norm import sum_over_ranks


@torch.library.custom_op("mindspeed::grouped_mm_all_reduce", mutates_args=())
def grouped_mm_all_reduce(x: list[Tensor], weight: list[Tensor], bias: list[Tensor], group: str) -> list[Tensor]:
    """Products of pairs, whose sums over ranks are one message.

    Args:
        x: [m_i, k_i] each, of one type.
        weight: [k_i, n_i] each.
        bias: [n_i] each, added once; [] for none.
        group: the name of the process group.

    Returns:
        [m_i, n_i] each.
    """
    return join([a @ w for a, w in zip(x, weight, strict=True)], bias, group)


def join(products: list[Tensor], bias: list[Tensor], group: str) -> list[Tensor]:
    """Sums over ranks of several tensors by one collective, and what is added to each afterwards."""
    flat = sum_over_ranks(torch.cat([p.flatten() for p in products]), group)
    # Copies, since results of one operator may not share memory.
    sums = [part.view(p.shape).clone() for part, p in zip(flat.split([p.numel() for p in products]), products)]
    return [s + b.to(s.dtype) for s, b in zip(sums, bias, strict=True)] if bias else sums


@grouped_mm_all_reduce.register_fake
def _(x: list[Tensor], weight: list[Tensor], bias: list[Tensor], group: str) -> list[Tensor]:
    return [a.new_empty(a.shape[0], w.shape[1]) for a, w in zip(x, weight)]


grouped = adopt(torch.ops.mindspeed.grouped_mm_all_reduce.default, grouped_mm_all_reduce)


@grouped.costs
def _cost(out: Any, x: Any, weight: Any, bias: Any, group: str) -> Cost:
    """Of this device: the products, and the copies into one message and out of it."""
    flops = sum(2 * a.numel * w.shape[1] for a, w in zip(x, weight))
    moved = size(out)
    return Cost(flops, flops, 0, size(x, weight, bias) + 2 * moved, 3 * moved, x[0].dtype)
