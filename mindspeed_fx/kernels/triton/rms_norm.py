"""RMSNorm in Triton, alone and of a sum: rows that fit a tile are read once; wider ones are walked in column blocks,
twice.

ADD: the row is x + residual, rounded and stored as the model has it. PLUS: another gradient of the row is added to dx.

The gradient of the weight is summed per program, in a fixed order, and then over programs: deterministic, no atomics.
Source: the fused backward of Liger Kernel (Hsu et al. 2024); partial sums as in Triton's layer norm tutorial.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton import column_sums
from mindspeed_fx.kernels.triton.launch import THREAD, as_rows, launch, only_cuda, power_of_two, programs, stages, warps
from mindspeed_fx.kernels.triton.rms_norm_weight_gradient import TILE, weight_gradient

FORWARD_WHOLE, BACKWARD_WHOLE = 2**16, 2**15
"""Bytes of the widest row kept in registers: wider ones spill on sm_80 or sm_90 (tests/kernels/test_triton.py)."""

STAGED = 8192
"""Elements of the widest row whose backward waits for the next ones beside it; wider rows take all registers."""

HELD = 12288
"""Elements of the widest row that the backward holds from its first half to its second: 16,384 are faster read again,
12,288 are not (benchmarks/results/2026-11-27-gpu_sweeps.txt)."""

SPLIT = 16384
"""Column block of wider rows: one program of 32 warps per multiprocessor, so that the rows in flight stay in the L2
cache between the two walks."""


@triton.jit
def rms_norm_forward(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    count,
    eps,
    N: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lines = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        base = tl.cast(first, tl.int64)
        in_rows = lines < count - first
        mask = in_rows[:, None] & (cols < N)
        x = tl.load(x_ptr + base * X_STRIDE + lines[:, None] * X_STRIDE + cols, mask=mask, other=0.0)
        if ADD:
            residual = tl.load(
                residual_ptr + base * RESIDUAL_STRIDE + lines[:, None] * RESIDUAL_STRIDE + cols, mask=mask, other=0.0
            )
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            tl.store(s_ptr + base * N + lines[:, None] * N + cols, x, mask=mask)
        wide = x.to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / N + eps)
        tl.store(rstd_ptr + base + lines, rstd, mask=in_rows)
        y = wide * rstd[:, None]
        if WEIGHT:
            if CAST_FIRST:
                y = y.to(x.dtype).to(tl.float32)
            y *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + base * N + lines[:, None] * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_forward_wide(
    x_ptr,
    residual_ptr,
    w_ptr,
    y_ptr,
    s_ptr,
    rstd_ptr,
    count,
    eps,
    N: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        base = tl.cast(row, tl.int64)
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base * X_STRIDE + cols, mask=cols < N, other=0.0)
            if ADD:
                x = (
                    x.to(tl.float32)
                    + tl.load(residual_ptr + base * RESIDUAL_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
                ).to(x.dtype)
                tl.store(s_ptr + base * N + cols, x, mask=cols < N)
            wide = x.to(tl.float32)
            squares += wide * wide
        rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
        tl.store(rstd_ptr + base, rstd)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base * X_STRIDE + cols, mask=cols < N, other=0.0)
            if ADD:  # recomputed: what this program stored may not be readable yet
                x = (
                    x.to(tl.float32)
                    + tl.load(residual_ptr + base * RESIDUAL_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
                ).to(x.dtype)
            y = x.to(tl.float32) * rstd
            if WEIGHT:
                if CAST_FIRST:
                    y = y.to(x.dtype).to(tl.float32)
                y *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(y_ptr + base * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def rms_norm_backward(
    g_ptr,
    plus_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    count,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    PLUS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    PLUS: tl.constexpr,
    WEIGHT: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    RELOAD: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RELOAD: rows are read again for the second half, from the cache: held, they and the sums fill the registers."""
    lines = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    # The sums keep a multiprocessor to one or two programs: the loads of the next rows start early to fill the gap.
    for first in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        base = tl.cast(first, tl.int64)
        in_rows = lines < count - first
        mask = in_rows[:, None] & (cols < N)
        x = tl.load(x_ptr + base * X_STRIDE + lines[:, None] * X_STRIDE + cols, mask=mask, other=0.0)
        g = tl.load(g_ptr + base * G_STRIDE + lines[:, None] * G_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + base + lines, mask=in_rows, other=0.0)[:, None]
        normal = x.to(tl.float32) * rstd
        h = g
        if WEIGHT:
            h = g * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        mean = tl.sum(h * normal, axis=1)[:, None] / N
        if RELOAD:
            x_at, g_at = base * X_STRIDE + lines[:, None] * X_STRIDE + cols, base * G_STRIDE + lines[:, None] * G_STRIDE
            x = tl.load(x_ptr + x_at, mask=mask, other=0.0, eviction_policy="evict_first")
            g = tl.load(g_ptr + g_at + cols, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
            normal = x.to(tl.float32) * rstd
            h = g
            if WEIGHT:
                h = g * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        dx = rstd * (h - normal * mean)
        if PLUS:
            dx += tl.load(plus_ptr + base * PLUS_STRIDE + lines[:, None] * PLUS_STRIDE + cols, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(dx_ptr + base * N + lines[:, None] * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_WEIGHT:
            if CAST_FIRST:
                normal = normal.to(x.dtype).to(tl.float32)
            dw += g * normal
    if NEED_WEIGHT:
        cols = tl.arange(0, BLOCK)
        tl.store(partial_ptr + tl.program_id(0) * N + cols, tl.sum(dw, axis=0), mask=cols < N)


@triton.jit
def rms_norm_backward_wide(
    g_ptr,
    plus_ptr,
    x_ptr,
    w_ptr,
    rstd_ptr,
    dx_ptr,
    count,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    PLUS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    PLUS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        base = tl.cast(row, tl.int64)
        rstd = tl.load(rstd_ptr + base)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base * X_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            h = tl.load(g_ptr + base * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            if WEIGHT:
                h *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            products += h * x
        mean = tl.sum(products, axis=0) * rstd / N
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base * X_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            h = tl.load(g_ptr + base * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            if WEIGHT:
                h *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            dx = rstd * (h - x * rstd * mean)
            if PLUS:
                dx += tl.load(plus_ptr + base * PLUS_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(dx_ptr + base * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


def forward(x: Tensor, weight: Tensor | None, eps: float, cast_first: bool) -> tuple[Tensor, Tensor]:
    """``mindspeed::rms_norm``: y [..., hidden] contiguous and rstd [..., 1] float32 of x [..., hidden]."""
    y, _, rstd = normalize(x, None, weight, eps, cast_first)
    return y, rstd


def normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, cast_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::add_rms_norm``: y and s [..., hidden] contiguous and rstd [..., 1] float32 of s = x + residual; s is
    x without one.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype) if weight is not None and cast_first else x.dtype
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    s = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    lines, others = as_rows(x), as_rows(x if residual is None else residual)
    count, n = lines.shape
    args = (lines, others, x if weight is None else weight.contiguous(), y, s, rstd, count, eps)
    constants = {
        "N": n,
        "X_STRIDE": lines.stride(0),
        "RESIDUAL_STRIDE": others.stride(0),
        "ADD": residual is not None,
        "WEIGHT": weight is not None,
        "CAST_FIRST": cast_first,
    }
    if n * x.element_size() > FORWARD_WHOLE:
        launch(rms_norm_forward_wide, programs(x, count, 32, 32), *args, num_warps=32, **constants, BLOCK=SPLIT)
        return y, s, rstd
    tile, num_warps = whole_rows(n)
    launch(
        rms_norm_forward,
        programs(x, -(-count // tile["ROWS"]), num_warps, None),
        *args,
        num_warps=num_warps,
        **constants,
        **tile,
    )
    return y, s, rstd


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, cast_first: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    """``mindspeed::rms_norm_backward``: dx [..., hidden] contiguous, dweight [hidden] (empty unless
    ``need_weight``).
    """
    return gradients(grad, None, x, weight, rstd, cast_first, need_weight)


def gradients(
    grad: Tensor,
    plus: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    cast_first: bool,
    need_weight: bool,
) -> tuple[Tensor, Tensor]:
    """``mindspeed::add_rms_norm_backward``: :func:`backward` with ``plus`` [..., hidden] added to dx."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g, others, lines, rstd = as_rows(grad), as_rows(grad if plus is None else plus), as_rows(x), rstd.contiguous()
    count, n = lines.shape
    w = x if weight is None else weight.contiguous()
    constants = {
        "N": n,
        "G_STRIDE": g.stride(0),
        "PLUS_STRIDE": others.stride(0),
        "X_STRIDE": lines.stride(0),
        "PLUS": plus is not None,
        "WEIGHT": weight is not None,
    }
    if n * x.element_size() <= BACKWARD_WHOLE:
        tile, num_warps = rows_of_sums(lines, 2 + (plus is not None), STAGED)
        # Every program leaves a partial sum of the weight's gradient: as few programs as keep the registers full.
        grid = programs(x, -(-count // tile["ROWS"]), num_warps, 16)
        partial = x.new_empty((grid if need_weight else 0, n), dtype=torch.float32)
        args = (g, others, lines, w, rstd, dx, partial if need_weight else dx, count)
        launch(
            rms_norm_backward,
            grid,
            *args,
            num_warps=num_warps,
            **constants,
            NEED_WEIGHT=need_weight,
            CAST_FIRST=cast_first,
            RELOAD=n > HELD and only_cuda(x),
            **tile,
        )
        return dx, column_sums.sums(partial, weight.dtype) if need_weight else x.new_empty(0)
    launch(
        rms_norm_backward_wide,
        programs(x, count, 32, 32),
        g,
        others,
        lines,
        w,
        rstd,
        dx,
        count,
        num_warps=32,
        **constants,
        BLOCK=SPLIT,
    )
    return dx, weight_gradient(g, lines, rstd, cast_first, weight.dtype) if need_weight else x.new_empty(0)


def whole_rows(n: int, tile: int = TILE, thread: int = THREAD) -> tuple[dict[str, int], int]:
    """Tile [ROWS, BLOCK] of whole rows that aims at ``tile`` elements, and its warps, of ``thread`` elements each
    thread.
    """
    block = power_of_two(n)
    lines = max(1, tile // block)
    return {"ROWS": lines, "BLOCK": block}, warps(lines * block, thread)


def rows_of_sums(x: Tensor, tensors: int, staged: int) -> tuple[dict[str, int], int]:
    """Tile of whole rows of x [rows, width], its STAGES, and its warps, for a loop that loads a tile of each of
    ``tensors`` like x and adds it up: the next ones start early where a row has at most ``staged`` elements.
    """
    n = x.shape[1]
    if n > staged:
        tile, num_warps = whole_rows(n, thread=2 * THREAD)
        return {"STAGES": 1, **tile}, num_warps
    tile, num_warps = whole_rows(n)
    loaded = tensors * tile["ROWS"] * tile["BLOCK"] * x.element_size()
    return {"STAGES": stages(x, loaded), **tile}, num_warps
