"""LayerNorm in Triton, alone and of a sum: rows that fit a tile are read once, wider ones in column blocks.

ADD: the row is x + residual, rounded and stored as the model has it. PLUS: another gradient of the row is added to dx.
The variance is that of centred values, never a difference of two large sums. Gradients of weight and bias are summed
per program, in a fixed order,
and then over programs: deterministic, no atomics. Source: Triton's layer norm tutorial, for the partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton import column_sums
from mindspeed_fx.kernels.triton import layer_norm_backward_parts as parts
from mindspeed_fx.kernels.triton.launch import as_rows, launch, only_cuda, programs, stages
from mindspeed_fx.kernels.triton.layer_norm_parameter_gradients import parameter_gradients
from mindspeed_fx.kernels.triton.rms_norm import SPLIT, rows_of_sums, whole_rows

FORWARD_WHOLE, BACKWARD_WHOLE = 2**15, 2**14
"""Bytes of the widest row kept in registers: the backward holds two rows of sums beside it."""

STAGED = 4096
"""Elements of the widest row whose backward waits for the next ones beside it."""

FORWARD_TILE, FORWARD_THREAD = 4096, 64
"""Elements that a tile of the forward aims at, and those of a thread: few warps wait for each other at its two sums."""

ALONE = 8192
"""Elements of the widest row of which each tile is a program; of wider ones a program starts the next row early."""


@triton.jit
def load_row(x_ptr, residual_ptr, at, other_at, mask, ADD: tl.constexpr):
    """x, or x + residual in the type of x."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(residual_ptr + other_at, mask=mask, other=0.0).to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def layer_norm_forward(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    count,
    eps,
    N: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lines = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    for first in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        base = tl.cast(first, tl.int64)
        in_rows = lines < count - first
        mask = in_rows[:, None] & (cols < N)
        x = load_row(
            x_ptr + base * X_STRIDE,
            residual_ptr + base * RESIDUAL_STRIDE,
            lines[:, None] * X_STRIDE + cols,
            lines[:, None] * RESIDUAL_STRIDE + cols,
            mask,
            ADD,
        )
        if ADD:
            tl.store(s_ptr + base * N + lines[:, None] * N + cols, x, mask=mask)
        wide = x.to(tl.float32)
        mean = tl.sum(wide, axis=1) / N
        centered = tl.where(mask, wide - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centered * centered, axis=1) / N + eps)
        tl.store(mean_ptr + base + lines, mean, mask=in_rows)
        tl.store(rstd_ptr + base + lines, rstd, mask=in_rows)
        y = centered * rstd[:, None]
        if WEIGHT:
            y *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + base * N + lines[:, None] * N + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_forward_wide(
    x_ptr,
    residual_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    count,
    eps,
    N: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        base = tl.cast(row, tl.int64)
        x_row, residual_row = x_ptr + base * X_STRIDE, residual_ptr + base * RESIDUAL_STRIDE
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = load_row(x_row, residual_row, cols, cols, cols < N, ADD)
            if ADD:
                tl.store(s_ptr + base * N + cols, x, mask=cols < N)
            total += x.to(tl.float32)
        mean = tl.sum(total, axis=0) / N
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            centered = tl.where(
                cols < N, load_row(x_row, residual_row, cols, cols, cols < N, ADD).to(tl.float32) - mean, 0.0
            )
            squares += centered * centered
        rstd = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / N + eps)
        tl.store(mean_ptr + base, mean)
        tl.store(rstd_ptr + base, rstd)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            y = (load_row(x_row, residual_row, cols, cols, cols < N, ADD).to(tl.float32) - mean) * rstd
            if WEIGHT:
                y *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            if BIAS:
                y += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(y_ptr + base * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def layer_norm_backward(
    g_ptr,
    plus_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    count,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    PLUS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    PLUS: tl.constexpr,
    WEIGHT: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lines = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)[None, :]
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    db = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS, num_stages=STAGES):
        base = tl.cast(first, tl.int64)
        in_rows = lines < count - first
        mask = in_rows[:, None] & (cols < N)
        x = tl.load(x_ptr + base * X_STRIDE + lines[:, None] * X_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + base * G_STRIDE + lines[:, None] * G_STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + base + lines, mask=in_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + base + lines, mask=in_rows, other=0.0)[:, None]
        # Beyond the row h is zero, so that what the centred zeros there are does not count.
        normal = (x - mean) * rstd
        h = g
        if WEIGHT:
            h = g * tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        along = tl.sum(h * normal, axis=1)[:, None] / N
        dx = rstd * (h - tl.sum(h, axis=1)[:, None] / N - normal * along)
        if PLUS:
            dx += tl.load(plus_ptr + base * PLUS_STRIDE + lines[:, None] * PLUS_STRIDE + cols, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(dx_ptr + base * N + lines[:, None] * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NEED_WEIGHT:
            dw += g * normal
        if NEED_BIAS:
            db += g
    cols = tl.arange(0, BLOCK)
    if NEED_WEIGHT:
        tl.store(dw_ptr + tl.program_id(0) * N + cols, tl.sum(dw, axis=0), mask=cols < N)
    if NEED_BIAS:
        tl.store(db_ptr + tl.program_id(0) * N + cols, tl.sum(db, axis=0), mask=cols < N)


@triton.jit
def layer_norm_backward_wide(
    g_ptr,
    plus_ptr,
    x_ptr,
    w_ptr,
    mean_ptr,
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
        mean, rstd = tl.load(mean_ptr + base), tl.load(rstd_ptr + base)
        total = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base * X_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            h = tl.load(g_ptr + base * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            if WEIGHT:
                h *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            total += h
            products += h * ((x - mean) * rstd)
        middle = tl.sum(total, axis=0) / N
        along = tl.sum(products, axis=0) / N
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base * X_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            h = tl.load(g_ptr + base * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            if WEIGHT:
                h *= tl.load(w_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
            dx = rstd * (h - middle - (x - mean) * rstd * along)
            if PLUS:
                dx += tl.load(plus_ptr + base * PLUS_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(dx_ptr + base * N + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < N)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::layer_norm``: y [..., hidden] contiguous, mean and rstd [..., 1] float32 of x [..., hidden]."""
    y, _, mean, rstd = normalize(x, None, weight, bias, eps)
    return y, mean, rstd


def normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``mindspeed::add_layer_norm``: y and s [..., hidden] contiguous, mean and rstd [..., 1] float32 of s = x +
    residual; s is x without one.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    s = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, rstd = (x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(2))
    lines, others = as_rows(x), as_rows(x if residual is None else residual)
    count, n = lines.shape
    w, b = (x if p is None else p.contiguous() for p in (weight, bias))
    args = (lines, others, w, b, y, s, mean, rstd, count, eps)
    constants = {
        "N": n,
        "X_STRIDE": lines.stride(0),
        "RESIDUAL_STRIDE": others.stride(0),
        "ADD": residual is not None,
        "WEIGHT": weight is not None,
        "BIAS": bias is not None,
    }
    if n * x.element_size() > FORWARD_WHOLE:
        launch(layer_norm_forward_wide, programs(x, count, 32, 32), *args, num_warps=32, **constants, BLOCK=SPLIT // 2)
    else:
        tile, num_warps = whole_rows(n, FORWARD_TILE, FORWARD_THREAD)
        loaded = (1 + (residual is not None)) * tile["ROWS"] * tile["BLOCK"] * x.element_size()
        launch(
            layer_norm_forward,
            programs(x, -(-count // tile["ROWS"]), num_warps, None if n <= ALONE else 32),
            *args,
            num_warps=num_warps,
            **constants,
            STAGES=1 if n <= ALONE else min(2, stages(x, loaded)),
            **tile,
        )
    return y, s, mean, rstd


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::layer_norm_backward``: dx [..., hidden] contiguous, dweight and dbias [hidden], empty unless
    needed.
    """
    return gradients(grad, None, x, weight, mean, rstd, need_weight, need_bias)


def gradients(
    grad: Tensor,
    plus: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    need_weight: bool,
    need_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::add_layer_norm_backward``: :func:`backward` with ``plus`` [..., hidden] added to dx."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    g, others, lines, mean, rstd = (
        as_rows(grad),
        as_rows(grad if plus is None else plus),
        as_rows(x),
        mean.contiguous(),
        rstd.contiguous(),
    )
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
    needs = {"NEED_WEIGHT": need_weight, "NEED_BIAS": need_bias}
    if n * x.element_size() <= BACKWARD_WHOLE:
        tile, num_warps = rows_of_sums(lines, 2 + (plus is not None), STAGED)
        # Every program leaves partial sums: as few programs as keep the registers full.
        grid = programs(x, -(-count // tile["ROWS"]), num_warps, 16)
        dw, db = (x.new_empty((grid if need else 0, n), dtype=torch.float32) for need in (need_weight, need_bias))
        sums = (dw if need_weight else dx, db if need_bias else dx)
        launch(
            layer_norm_backward,
            grid,
            g,
            others,
            lines,
            w,
            mean,
            rstd,
            dx,
            *sums,
            count,
            num_warps=num_warps,
            **constants,
            **needs,
            **tile,
        )
    elif n <= parts.PART * parts.PARTS and only_cuda(x):
        dw, db = parts.gradients_in_parts(g, others, lines, w, mean, rstd, dx, constants, needs)
    else:
        launch(
            layer_norm_backward_wide,
            programs(x, count, 32, 32),
            g,
            others,
            lines,
            w,
            mean,
            rstd,
            dx,
            count,
            num_warps=32,
            **constants,
            BLOCK=SPLIT // 2,
        )
        dw, db = parameter_gradients(g, lines, mean, rstd, dx, needs)
    return (
        dx,
        column_sums.sums(dw, weight.dtype) if need_weight else x.new_empty(0),
        column_sums.sums(db, torch.float32) if need_bias else x.new_empty(0, dtype=torch.float32),
    )
