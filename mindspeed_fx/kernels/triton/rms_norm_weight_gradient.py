"""The gradient of the weight of an RMSNorm whose rows are wider than one program can hold, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton import column_sums
from mindspeed_fx.kernels.triton.launch import launch, programs, warps

TILE = 4096
"""Elements that a tile of narrow rows aims at."""


@triton.jit
def rms_norm_weight_gradient(
    g_ptr,
    x_ptr,
    rstd_ptr,
    partial_ptr,
    count,
    chunks,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    CAST_FIRST: tl.constexpr,
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
        for first in range(chunk * ROWS, count, chunks * ROWS):
            base = tl.cast(first, tl.int64)
            in_rows = lines < count - first
            mask = in_rows[:, None] & (cols < N)
            x = tl.load(x_ptr + base * X_STRIDE + lines[:, None] * X_STRIDE + cols, mask=mask, other=0.0)
            g = tl.load(g_ptr + base * G_STRIDE + lines[:, None] * G_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
            normal = x.to(tl.float32) * tl.load(rstd_ptr + base + lines, mask=in_rows, other=0.0)[:, None]
            if CAST_FIRST:
                normal = normal.to(x.dtype).to(tl.float32)
            dw += g * normal
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        tl.store(partial_ptr + chunk * N + cols, tl.sum(dw, axis=0), mask=cols < N)


def weight_gradient(g: Tensor, x: Tensor, rstd: Tensor, cast_first: bool, dtype: torch.dtype) -> Tensor:
    """Sum over rows of g * x * rstd, in ``dtype``, where one program cannot hold a whole row of sums."""
    count, n = x.shape
    tile = {"ROWS": 4, "BLOCK": TILE // 4}
    blocks, num_warps = -(-n // tile["BLOCK"]), warps(TILE)
    grid = programs(x, blocks * -(-count // tile["ROWS"]), num_warps, 32)
    # Rounded down: a chunk too many would keep a few programs busy twice as long as the rest.
    chunks = max(1, grid // blocks)
    partial = x.new_empty((chunks, n), dtype=torch.float32)
    launch(
        rms_norm_weight_gradient,
        grid,
        g,
        x,
        rstd,
        partial,
        count,
        chunks,
        num_warps=num_warps,
        N=n,
        G_STRIDE=g.stride(0),
        X_STRIDE=x.stride(0),
        CAST_FIRST=cast_first,
        **tile,
    )
    return column_sums.sums(partial, dtype)
