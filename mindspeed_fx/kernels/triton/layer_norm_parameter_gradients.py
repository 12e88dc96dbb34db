"""The gradients of weight and bias of a LayerNorm whose rows are wider than one program can hold, in Triton.

Summed per chunk of rows, in a fixed order, and then over chunks: deterministic, no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, programs, warps
from mindspeed_fx.kernels.triton.rms_norm_weight_gradient import TILE


@triton.jit
def layer_norm_parameter_gradients(
    g_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    dw_ptr,
    db_ptr,
    count,
    chunks,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows dealt out over ``chunks``: chunk c sums rows c * ROWS, (c + chunks) * ROWS ... of one column block."""
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    lines = tl.arange(0, ROWS)
    for item in range(tl.program_id(0), chunks * BLOCKS, tl.num_programs(0)):
        chunk = item // BLOCKS
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)[None, :]
        dw = tl.zeros([ROWS, BLOCK], tl.float32)
        db = tl.zeros([ROWS, BLOCK], tl.float32)
        for first in range(chunk * ROWS, count, chunks * ROWS):
            base = tl.cast(first, tl.int64)
            in_rows = lines < count - first
            mask = in_rows[:, None] & (cols < N)
            g = tl.load(g_ptr + base * G_STRIDE + lines[:, None] * G_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
            if NEED_WEIGHT:
                x = tl.load(x_ptr + base * X_STRIDE + lines[:, None] * X_STRIDE + cols, mask=mask, other=0.0).to(
                    tl.float32
                )
                mean = tl.load(mean_ptr + base + lines, mask=in_rows, other=0.0)[:, None]
                dw += g * ((x - mean) * tl.load(rstd_ptr + base + lines, mask=in_rows, other=0.0)[:, None])
            if NEED_BIAS:
                db += g
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        if NEED_WEIGHT:
            tl.store(dw_ptr + chunk * N + cols, tl.sum(dw, axis=0), mask=cols < N)
        if NEED_BIAS:
            tl.store(db_ptr + chunk * N + cols, tl.sum(db, axis=0), mask=cols < N)


def parameter_gradients(
    g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, unused: Tensor, needs: dict[str, bool]
) -> tuple[Tensor, Tensor]:
    """Partial sums [chunks, hidden] of both gradients, where one program cannot hold a whole row of them."""
    count, n = x.shape
    tile = {"ROWS": 4, "BLOCK": TILE // 4}
    blocks, num_warps = -(-n // tile["BLOCK"]), warps(TILE)
    grid = programs(x, blocks * -(-count // tile["ROWS"]), num_warps, 32)
    chunks = max(1, grid // blocks)
    dw, db = (x.new_empty((chunks if need else 0, n), dtype=torch.float32) for need in needs.values())
    sums = (t if need else unused for t, need in zip((dw, db), needs.values()))
    if any(needs.values()):
        launch(
            layer_norm_parameter_gradients,
            grid,
            g,
            x,
            mean,
            rstd,
            *sums,
            count,
            chunks,
            num_warps=num_warps,
            N=n,
            G_STRIDE=g.stride(0),
            X_STRIDE=x.stride(0),
            **needs,
            **tile,
        )
    return dw, db
