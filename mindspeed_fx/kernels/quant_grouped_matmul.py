"""Grouped product of 8-bit rows and matrices with scales, for inference: integers, or floats of 8 bits.

Source: MindSpeed's ``quant_gmm`` and torch_npu's ``npu_grouped_matmul`` with ``scale`` and ``per_token_scale``. No
gradient: rounding to 8 bits has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels.base import operator

DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def _fake(x, weight, offsets, scale, per_token_scale, dtype):
    return x.new_empty((x.shape[0], weight.shape[2]), dtype=dtype)


@operator(
    "quant_grouped_matmul(Tensor x, Tensor weight, Tensor offsets, Tensor scale, Tensor? per_token_scale, ScalarType "
    "dtype) -> Tensor",
    _fake,
    opaque=True,
)
def quant_grouped_matmul(
    x: Tensor, weight: Tensor, offsets: Tensor, scale: Tensor, per_token_scale: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """One product per group of rows: y[t] = (x[t] w_e) scale_e per_token_scale[t], for t of group e.

    Products of int8 are summed exactly (in float64, which holds every sum of fewer than 2^39 of them), of float8 in
    float32.

    Args:
        x: [tokens, k], of 8 bits (:data:`DTYPES`), sorted by group.
        weight: [groups, k, n], of the type of ``x``.
        offsets: [groups] int32 or int64: where each group ends.
        scale: [groups, n], float: of the columns of each matrix.
        per_token_scale: [tokens], float32; None: ones.
        dtype: of the result.

    Returns:
        [tokens, n]; rows from ``offsets[-1]`` on are zero.
    """
    wide = torch.float32 if x.dtype.is_floating_point and x.dtype.itemsize == 1 else torch.float64
    out = x.new_zeros((x.shape[0], weight.shape[2]), dtype=dtype)
    start = 0
    for end, matrix, columns in zip(offsets.tolist(), weight, scale):
        rows = (x[start:end].to(wide) @ matrix.to(wide)) * columns.to(wide)
        if per_token_scale is not None:
            rows = rows * per_token_scale[start:end, None].to(wide)
        out[start:end] = rows.to(dtype)
        start = end
    return out


@quant_grouped_matmul.costs
def _cost(out, x, weight, offsets, scale, per_token_scale, dtype):
    """Every row times one matrix; the matrix units' rate of the type of ``x``."""
    flops = 2 * x.shape[0] * weight.shape[1] * weight.shape[2]
    return once(out, x, weight, offsets, scale, per_token_scale, flops=flops, vector=2 * out.numel, dtype=x.dtype)


@quant_grouped_matmul.shard
def _sharding_rule(x, weight, offsets, scale, per_token_scale, dtype):
    """By column; a sum of parts that were rounded to ``dtype`` is another result."""
    return [([1], [REPLICATED, 2, REPLICATED, 1, *([REPLICATED] if per_token_scale is not None else [])])]
