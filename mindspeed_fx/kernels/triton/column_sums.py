"""Sums over the rows that the programs of a kernel leave, in Triton: gradients of weights, the last step.

In a fixed order: deterministic, no atomics. On an H200 6 us, where torch's sum over 2,112 rows of 128 takes 12 and its
change of type a launch more (benchmarks/results/2026-11-27-gpu_sweeps.txt).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, only_cuda

ROWS, NARROW, COLUMNS = 512, 512, 16
"""Rows and columns of a tile; columns up to which it has only four, so that there are programs for many
multiprocessors."""


@triton.jit
def column_sums(p_ptr, out_ptr, count, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out [N] of p [count, N] float32."""
    lines = tl.arange(0, ROWS)[:, None]
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    for first in range(0, count, ROWS):
        inside = (lines < count - first) & (cols < N)
        total += tl.load(p_ptr + (first + lines) * N + cols, mask=inside, other=0.0)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(out_ptr + cols, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=cols < N)


def sums(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums [n] over the rows of ``partial`` [count, n] float32 contiguous, in ``dtype``."""
    count, n = partial.shape
    if not only_cuda(partial):
        return partial.sum(0).to(dtype)
    out = partial.new_empty(n, dtype=dtype)
    cols = 4 if n <= NARROW else COLUMNS
    launch(column_sums, -(-n // cols), partial, out, count, num_warps=8, N=n, ROWS=ROWS, COLS=cols)
    return out
