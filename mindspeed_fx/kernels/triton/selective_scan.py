"""Mamba's selective scan in Triton: a program walks through the tokens of a segment of the sequence with the states
[n, COLUMNS] of some channels on chip.

Letters and formulas as at the top of mindspeed_fx/kernels/selective_scan.py. Rows are of channels or of n that lie
beside each other; what is laid out otherwise is copied. All is computed in float32. The state before each segment
comes first (selective_scan_segments.py); an NPU has one segment, and reads and writes a tile of tokens at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import selective_scan as definition
from mindspeed_fx.kernels.triton.launch import launch, programs
from mindspeed_fx.kernels.triton.recurrence import put_rows, rows_of
from mindspeed_fx.kernels.triton.selective_scan_segments import (
    SIZES,
    WARPS,
    Segments,
    Sizes,
    decay_of,
    of_channels,
    put_row,
    rates_of,
    softplus,
    step_of,
    token_rows,
)

RESIDENT = 24
"""Warps of a multiprocessor for which a sequence is split. Measured: benchmarks/results/2026-11-27-gpu_sweeps.txt."""


@triton.jit
def row(x, j, T: tl.constexpr):
    """Row j of x [T, width]; no device reads registers by a number that is computed."""
    return tl.sum(tl.where(tl.arange(0, T)[:, None] == j, x, 0.0), axis=0)


@triton.jit
def raw_steps(
    base, stride, bias_ptr, first, seq, low, CHANNELS: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """dt plus the bias [T, COLUMNS], before a softplus."""
    raw = rows_of(base, stride, first, seq, low, CHANNELS, T, COLUMNS).to(tl.float32)
    if BIAS:
        at = low + tl.arange(0, COLUMNS)
        raw += tl.load(bias_ptr + at, mask=at < CHANNELS, other=0.0).to(tl.float32)[None, :]
    return raw


@triton.jit
def steps(raw, first, seq, SOFTPLUS: tl.constexpr, T: tl.constexpr):
    """The step of each token and channel; none beyond the sequence, which leaves the state alone."""
    if SOFTPLUS:
        raw = softplus(raw)
    return tl.where(tl.arange(0, T)[:, None] < seq - first, raw, 0.0)


@triton.jit
def tile_of(
    u, u1, dt, s1, bias_ptr, b, b1, first, seq, low, CHANNELS: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """(dt plus the bias, the steps, u [T, COLUMNS], B [T, WIDE]) of a tile; pointers are those of the batch's row."""
    raw = raw_steps(dt, s1, bias_ptr, first, seq, low, CHANNELS, BIAS, T, COLUMNS)
    inputs = rows_of(u, u1, first, seq, low, CHANNELS, T, COLUMNS).to(tl.float32)
    return raw, steps(raw, first, seq, SOFTPLUS, T), inputs, rows_of(b, b1, first, seq, 0, N, T, WIDE).to(tl.float32)


@triton.jit
def next_state(state, step, x, b, a, j, T: tl.constexpr):
    """The state [n, COLUMNS] after token j of a tile: steps and their inputs x [T, COLUMNS], b [T, n]."""
    return decay_of(row(step, j, T)[None, :] * a) * state + row(b, j, T)[:, None] * row(x, j, T)[None, :]


@triton.jit
def walk_tile(
    state, a, u, u1, dt, s1, b, b1, c, c1, d_ptr, z, z1, bias_ptr, out, first, seq, low, CHANNELS: tl.constexpr,
    N: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The state after a tile, whose results are written; tokens are read together and chosen by sums over them."""
    rows, at = tl.arange(0, T)[:, None], low + tl.arange(0, COLUMNS)[None, :]
    raw, step, of_u, of_b = tile_of(
        u, u1, dt, s1, bias_ptr, b, b1, first, seq, low, CHANNELS, N, BIAS, SOFTPLUS, T, WIDE, COLUMNS
    )
    of_c = rows_of(c, c1, first, seq, 0, N, T, WIDE).to(tl.float32)
    x, y = step * of_u, of_u * 0.0
    for j in range(0, T):
        state = next_state(state, step, x, of_b, a, j, T)
        y = tl.where(rows == j, tl.sum(row(of_c, j, T)[:, None] * state, axis=0)[None, :], y)
    if SKIP:
        y += of_u * tl.load(d_ptr + at, mask=at < CHANNELS, other=0.0).to(tl.float32)
    if GATE:
        of_z = rows_of(z, z1, first, seq, low, CHANNELS, T, COLUMNS).to(tl.float32)
        y *= of_z * tl.sigmoid(of_z)
    put_rows(out, CHANNELS, first, seq, low, y, CHANNELS, T, COLUMNS)
    return state


@triton.jit
def walk_tokens(
    state, a, u, u1, dt, s1, b, b1, c, c1, skip, z, z1, bias, out, first, seq, low, CHANNELS: tl.constexpr,
    N: tl.constexpr, GATE: tl.constexpr, SOFTPLUS: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """:func:`walk_tile` with a row for each token, all read first: each thread has channels with all their states."""
    raws = token_rows(dt, s1, first, seq, low, CHANNELS, T, COLUMNS, False)
    us = token_rows(u, u1, first, seq, low, CHANNELS, T, COLUMNS, False)
    bs, cs = token_rows(b, b1, first, seq, 0, N, T, WIDE, True), token_rows(c, c1, first, seq, 0, N, T, WIDE, True)
    zs = us
    if GATE:
        zs = token_rows(z, z1, first, seq, low, CHANNELS, T, COLUMNS, False)
    for j in tl.static_range(0, T):
        step = step_of(raws[j] + bias, first + j < seq, SOFTPLUS)
        state = decay_of(step * a) * state + bs[j][:, None] * (step * us[j])
        y = tl.sum(cs[j][:, None] * state, axis=0)[None, :] + us[j] * skip
        if GATE:
            y *= zs[j] * tl.sigmoid(zs[j])
        put_row(out, CHANNELS, first + j, seq, low, y, CHANNELS, COLUMNS, False)
    return state


@triton.jit(do_not_specialize=SIZES)
def selective_scan_states(
    u_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, state_ptr, out_ptr, final_ptr, starts_ptr, count, seq,
    tiles, chunks, segments, each, u0, u1, s0, s1, b0, b1, c0, c1, z0, z1,
    CHANNELS: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    STATE: tl.constexpr, SOFTPLUS: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, APART: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The result [batch, seq, CHANNELS], the states before every SPAN tiles of T tokens and the last one
    [.., N, CHANNELS]; A is [N, CHANNELS], the state before each segment of ``each`` tiles [batch, segments, N,
    CHANNELS]. Strides are those of batch and sequence. APART: tokens are read one by one."""
    PARTS: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    wide = tl.arange(0, WIDE)[:, None]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        batch, start = line // segments, tl.cast(line % segments, tl.int32) * each
        at = low + tl.arange(0, COLUMNS)[None, :]
        here, inside = wide * CHANNELS + at, (wide < N) & (at < CHANNELS)
        a = rates_of(a_ptr, here, inside)
        state = a * 0.0
        if STATE:
            state = tl.load(state_ptr + line * N * CHANNELS + here, mask=inside, other=0.0).to(tl.float32)
        u, dt, b, c = u_ptr + batch * u0, dt_ptr + batch * s0, b_ptr + batch * b0, c_ptr + batch * c0
        z, out = z_ptr + batch * z0, out_ptr + batch * seq * CHANNELS
        if APART:
            bias = of_channels(bias_ptr, low, CHANNELS, BIAS, COLUMNS, False)
            skip = of_channels(d_ptr, low, CHANNELS, SKIP, COLUMNS, False)
        for tile in range(start, tl.minimum(start + each, tiles)):
            if tile % SPAN == 0:
                tl.store(starts_ptr + (batch * chunks + tile // SPAN) * N * CHANNELS + here, state, mask=inside)
            if APART:
                state = walk_tokens(
                    state, a, u, u1, dt, s1, b, b1, c, c1, skip, z, z1, bias, out, tile * T, seq, low, CHANNELS, N,
                    GATE, SOFTPLUS, T, WIDE, COLUMNS,
                )  # fmt: skip
            else:
                state = walk_tile(
                    state, a, u, u1, dt, s1, b, b1, c, c1, d_ptr, z, z1, bias_ptr, out, tile * T, seq, low, CHANNELS,
                    N, SKIP, GATE, BIAS, SOFTPLUS, T, WIDE, COLUMNS,
                )  # fmt: skip
        if start + each >= tiles:
            tl.store(final_ptr + batch * N * CHANNELS + here, state, mask=inside)


def forward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::selective_scan``."""
    definition.check(u, dt, A, B, C, D, z, bias, state)
    out, final, starts = definition.fake(u, dt, A, B, C, D, z, bias, state, softplus)
    sizes = Sizes(u, dt, A, B, C, D, z, bias, softplus)
    last = starts.new_empty((sizes.batch, *starts.shape[2:]))
    if not sizes.tiles:
        final.zero_() if state is None else final.copy_(state)
        return out, final, starts
    segments = Segments(sizes, RESIDENT)
    first = segments.states(None if state is None else state.transpose(1, 2).contiguous())
    launch(
        selective_scan_states,
        programs(u, sizes.count * segments.number, WARPS, None),
        *sizes.arguments, last if first is None else first, out, last, starts, sizes.count * segments.number,
        sizes.seq, sizes.tiles, starts.shape[1], segments.number, segments.chunks * sizes.span, *sizes.strides,
        num_warps=WARPS, STATE=first is not None, APART=sizes.apart, **sizes.walk, **sizes.constants,
    )  # fmt: skip
    final.copy_(last.transpose(1, 2))
    return out, final, starts
