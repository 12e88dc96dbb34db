"""Mamba's selective scan in Triton: a program walks through the tokens with the states [n, COLUMNS] of some channels on
chip, reading and writing them a tile of tokens at a time.

Letters and formulas as at the top of mindspeed_fx/kernels/selective_scan.py. Rows are of channels or of n that lie
beside each other; what is laid out otherwise is copied. All is computed in float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import selective_scan as definition
from mindspeed_fx.kernels.selective_scan import CHUNK
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs
from mindspeed_fx.kernels.triton.recurrence import put_rows, rows_of

TOKENS = 8
"""Of a tile; divides CHUNK, the tokens between states that are kept."""
COLUMNS = 32
"""Channels of a program."""
WARPS = 4


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
    """The step of each token and channel; none beyond the sequence, which leaves the state alone. log1p(e) is
    log(w) e / (w - 1) with w = 1 + e, whose roundings cancel."""
    if SOFTPLUS:
        e = tl.exp(tl.minimum(raw, 20.0))
        w = 1.0 + e
        raw = tl.where(raw <= 20.0, tl.where(w == 1.0, e, tl.log(w) * (e / (w - 1.0))), raw)
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
    return tl.exp(row(step, j, T)[None, :] * a) * state + row(b, j, T)[:, None] * row(x, j, T)[None, :]


@triton.jit
def selective_scan_states(
    u_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, state_ptr, out_ptr, final_ptr, starts_ptr, count, seq,
    tiles, chunks, u0, u1, s0, s1, b0, b1, c0, c1, z0, z1,
    CHANNELS: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    STATE: tl.constexpr, SOFTPLUS: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """The result [batch, seq, CHANNELS], the states before every SPAN tiles and the last one [.., N, CHANNELS]; A is
    [N, CHANNELS]. Strides are those of batch and sequence."""
    PARTS: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    rows, wide = tl.arange(0, T)[:, None], tl.arange(0, WIDE)[:, None]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        batch, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        at = low + tl.arange(0, COLUMNS)[None, :]
        here, inside = wide * CHANNELS + at, (wide < N) & (at < CHANNELS)
        a = tl.load(a_ptr + here, mask=inside, other=0.0).to(tl.float32)
        state = a * 0.0
        if STATE:
            state = tl.load(state_ptr + batch * N * CHANNELS + here, mask=inside, other=0.0).to(tl.float32)
        for tile in range(0, tiles):
            if tile % SPAN == 0:
                tl.store(starts_ptr + (batch * chunks + tile // SPAN) * N * CHANNELS + here, state, mask=inside)
            first = tile * T
            raw, step, u, b = tile_of(
                u_ptr + batch * u0, u1, dt_ptr + batch * s0, s1, bias_ptr, b_ptr + batch * b0, b1, first, seq, low,
                CHANNELS, N, BIAS, SOFTPLUS, T, WIDE, COLUMNS,
            )  # fmt: skip
            c = rows_of(c_ptr + batch * c0, c1, first, seq, 0, N, T, WIDE).to(tl.float32)
            x, y = step * u, u * 0.0
            for j in range(0, T):
                state = next_state(state, step, x, b, a, j, T)
                y = tl.where(rows == j, tl.sum(row(c, j, T)[:, None] * state, axis=0)[None, :], y)
            if SKIP:
                y += u * tl.load(d_ptr + at, mask=at < CHANNELS, other=0.0).to(tl.float32)
            if GATE:
                z = rows_of(z_ptr + batch * z0, z1, first, seq, low, CHANNELS, T, COLUMNS).to(tl.float32)
                y *= z * tl.sigmoid(z)
            put_rows(out_ptr + batch * seq * CHANNELS, CHANNELS, first, seq, low, y, CHANNELS, T, COLUMNS)
        tl.store(final_ptr + batch * N * CHANNELS + here, state, mask=inside)


def by_row(x: Tensor) -> Tensor:
    """``x`` [batch, width, seq] with what belongs to a token side by side: what is laid out otherwise is copied."""
    return x if x.stride(1) == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


class Sizes:
    """Tiles of a call, its arguments by row, and what both kernels are given."""

    def __init__(self, u, dt, A, B, C, D, z, bias, softplus):
        (self.batch, channels, self.seq), n = u.shape, A.shape[1]
        self.tiles, self.parts = -(-self.seq // TOKENS), -(-channels // COLUMNS)
        self.count = self.batch * self.parts
        of_tokens = [by_row(x) for x in (u, dt, B, C, u if z is None else z)]
        u, dt, B, C, z_or_u = of_tokens
        a = A.t().contiguous()
        self.arguments = (u, dt, a, B, C, a if D is None else D.contiguous(), z_or_u)
        self.arguments += (a if bias is None else bias.contiguous(),)
        self.strides = [n for x in of_tokens for n in (x.stride(0), x.stride(2))]
        self.constants: dict[str, Any] = {
            "CHANNELS": channels, "N": n, "SKIP": D is not None, "GATE": z is not None, "BIAS": bias is not None,
            "SOFTPLUS": softplus, "T": TOKENS, "SPAN": CHUNK // TOKENS, "WIDE": power_of_two(n), "COLUMNS": COLUMNS,
        }  # fmt: skip


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
    launch(
        selective_scan_states,
        programs(u, sizes.count, WARPS, 16),
        *sizes.arguments, last if state is None else state.transpose(1, 2).contiguous(), out, last, starts,
        sizes.count, sizes.seq, sizes.tiles, starts.shape[1], *sizes.strides,
        num_warps=WARPS, STATE=state is not None, **sizes.constants,
    )  # fmt: skip
    final.copy_(last.transpose(1, 2))
    return out, final, starts
