"""The gradients of LayerNorms of wide rows in Triton: a row in up to four parts, read twice, the second time from the
cache; only the sums of the weight's and bias's gradients stay in registers, a part each.

Held whole, a row and its two rows of sums would spill. Source: the formulas of
mindspeed_fx/kernels/triton/layer_norm.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, programs

PART, PARTS = 4096, 4
"""Elements of a part, and how many there may be."""


@triton.jit
def layer_norm_backward_parts(
    g_ptr, plus_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, count,
    N: tl.constexpr, G_STRIDE: tl.constexpr, PLUS_STRIDE: tl.constexpr, X_STRIDE: tl.constexpr,
    PLUS: tl.constexpr, WEIGHT: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """As layer_norm_backward of layer_norm.py, in parts of PART columns."""
    PARTS: tl.constexpr = (N + PART - 1) // PART
    columns = tl.arange(0, PART)
    zeros = tl.zeros([PART], tl.float32)
    dw0, dw1, dw2, dw3 = zeros, zeros, zeros, zeros
    db0, db1, db2, db3 = zeros, zeros, zeros, zeros
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        base = tl.cast(row, tl.int64)
        x_row, g_row = x_ptr + base * X_STRIDE, g_ptr + base * G_STRIDE
        mean, rstd = tl.load(mean_ptr + base), tl.load(rstd_ptr + base)
        products = tl.zeros([PART], tl.float32)
        total = tl.zeros([PART], tl.float32)
        for part in tl.static_range(PARTS):
            cols = part * PART + columns
            x = tl.load(x_row + cols, mask=cols < N, other=0.0).to(tl.float32)
            h = tl.load(g_row + cols, mask=cols < N, other=0.0).to(tl.float32)
            if WEIGHT:
                h *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            products += h * ((x - mean) * rstd)
            total += h
        along, middle = tl.sum(products, axis=0) / N, tl.sum(total, axis=0) / N
        for part in tl.static_range(PARTS):
            cols = part * PART + columns
            x = tl.load(x_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            g = tl.load(g_row + cols, mask=cols < N, other=0.0, eviction_policy="evict_first").to(tl.float32)
            normal = (x - mean) * rstd
            h = g
            if WEIGHT:
                h = g * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            dx = rstd * (h - middle - normal * along)
            if PLUS:
                dx += tl.load(plus_ptr + base * PLUS_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(dx_ptr + base * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)
            if part == 0:
                dw0 += g * normal
                db0 += g
            elif part == 1:
                dw1 += g * normal
                db1 += g
            elif part == 2:
                dw2 += g * normal
                db2 += g
            else:
                dw3 += g * normal
                db3 += g
    dw_row, db_row = dw_ptr + tl.program_id(0) * N, db_ptr + tl.program_id(0) * N
    for part in tl.static_range(PARTS):
        cols = part * PART + columns
        if NEED_WEIGHT:
            dw = dw0 if part == 0 else dw1 if part == 1 else dw2 if part == 2 else dw3
            tl.store(dw_row + cols, dw, mask=cols < N)
        if NEED_BIAS:
            db = db0 if part == 0 else db1 if part == 1 else db2 if part == 2 else db3
            tl.store(db_row + cols, db, mask=cols < N)


def gradients_in_parts(
    g: Tensor, plus: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, dx: Tensor,
    constants: dict[str, Any], needs: dict[str, bool]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Writes dx [rows, hidden], hidden at most PART * PARTS; partial sums [programs, hidden] of both other gradients,
    empty where they are not needed.
    """
    count, n = x.shape
    # Three parts of sums leave registers for 16 warps, four do not: measured at 12,288 and 16,384 elements.
    num_warps = 16 if n <= 3 * PART else 8
    grid = programs(x, count, num_warps, num_warps)
    dw, db = (x.new_empty((grid if need else 0, n), dtype=torch.float32) for need in needs.values())
    into = (partial if need else dx for partial, need in zip((dw, db), needs.values()))
    launch(
        layer_norm_backward_parts, grid, g, plus, x, weight, mean, rstd, dx, *into, count,
        num_warps=num_warps, **constants, **needs, PART=PART,
    )  # fmt: skip
    return dw, db
