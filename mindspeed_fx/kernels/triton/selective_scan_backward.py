"""Gradients of the selective scan in Triton: a program walks back through the tokens of some channels. Here that of an
NPU, by tiles of tokens; cuda's in selective_scan_segment_gradients.py.

The state before a token comes from the state kept before its chunk, once more: no device reads registers by a number
that is computed, and tiles [T, n, COLUMNS] of all of them do not fit an NPU. What several
programs have of one gradient is summed after: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import selective_scan as definition
from mindspeed_fx.kernels.recurrence import check_shapes
from mindspeed_fx.kernels.triton import selective_scan_segment_gradients as segment_gradients
from mindspeed_fx.kernels.triton.launch import launch, only_cuda, programs
from mindspeed_fx.kernels.triton.recurrence import put_rows, rows_of
from mindspeed_fx.kernels.triton.selective_scan import next_state, row, tile_of
from mindspeed_fx.kernels.triton.selective_scan_segments import (
    WARPS,
    Sizes,
    by_row,
    decay_of,
    rate_sums,
    rates_of,
)


@triton.jit
def state_at(state, step, x, b, a, j, T: tl.constexpr):
    """The state before token j of a tile, from that before the first."""
    for k in range(0, j):
        state = next_state(state, step, x, b, a, k, T)
    return state


@triton.jit
def state_before(
    state, tile, a, u, u1, dt, s1, bias_ptr, b, b1, seq, low, CHANNELS: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """The state before a tile, from that before the first of its SPAN tiles; pointers are those of the batch's row."""
    for before in range(tile // SPAN * SPAN, tile):
        _, step, inputs, columns = tile_of(
            u, u1, dt, s1, bias_ptr, b, b1, before * T, seq, low, CHANNELS, N, BIAS, SOFTPLUS, T, WIDE, COLUMNS
        )
        state = state_at(state, step, inputs * step, columns, a, T, T)
    return state


@triton.jit
def selective_scan_gradients(
    u_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, grad_ptr, last_ptr, starts_ptr, du_ptr, ddt_ptr,
    dz_ptr, db_ptr, dc_ptr, da_ptr, dskip_ptr, dbias_ptr, dstate_ptr, count, seq, tiles, chunks,
    u0, u1, s0, s1, b0, b1, c0, c1, z0, z1, g0, g1,
    CHANNELS: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    STATE: tl.constexpr, SOFTPLUS: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of u, dt and z [batch, seq, CHANNELS]; of B and C from each part of channels [batch, PARTS, seq, N];
    of A, D and the bias from each row of the batch, and of the first state [batch, N, CHANNELS]."""
    PARTS: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    rows, wide = tl.arange(0, T)[:, None], tl.arange(0, WIDE)[:, None]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        batch, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        at = low + tl.arange(0, COLUMNS)[None, :]
        here, inside = wide * CHANNELS + at, (wide < N) & (at < CHANNELS)
        a = rates_of(a_ptr, here, inside)
        u_row, dt_row, b_row = u_ptr + batch * u0, dt_ptr + batch * s0, b_ptr + batch * b0
        dnow, da = a * 0.0, a * 0.0
        if STATE:
            dnow = tl.load(last_ptr + batch * N * CHANNELS + here, mask=inside, other=0.0).to(tl.float32)
        dskip, dbias = tl.sum(da, axis=0), tl.sum(da, axis=0)
        for turn in range(0, tiles):
            tile = tiles - 1 - turn
            state = tl.load(starts_ptr + (batch * chunks + tile // SPAN) * N * CHANNELS + here, mask=inside, other=0.0)
            state = state_before(
                state, tile, a, u_row, u1, dt_row, s1, bias_ptr, b_row, b1, seq, low, CHANNELS, N, BIAS, SOFTPLUS, T,
                SPAN, WIDE, COLUMNS,
            )  # fmt: skip
            first = tile * T
            raw, step, u, b = tile_of(
                u_row, u1, dt_row, s1, bias_ptr, b_row, b1, first, seq, low, CHANNELS, N, BIAS, SOFTPLUS, T, WIDE,
                COLUMNS,
            )  # fmt: skip
            c = rows_of(c_ptr + batch * c0, c1, first, seq, 0, N, T, WIDE).to(tl.float32)
            dy = rows_of(grad_ptr + batch * g0, g1, first, seq, low, CHANNELS, T, COLUMNS).to(tl.float32)
            x, y, skip, grad = step * u, u * 0.0, u * 0.0, dy
            if SKIP:
                skip += tl.load(d_ptr + at, mask=at < CHANNELS, other=0.0).to(tl.float32)
            if GATE:
                z = rows_of(z_ptr + batch * z0, z1, first, seq, low, CHANNELS, T, COLUMNS).to(tl.float32)
                half = tl.sigmoid(z)
                dy *= z * half
            dx, ddt, db, dc = u * 0.0, u * 0.0, b * 0.0, b * 0.0
            for i in range(0, T):
                j = T - 1 - i
                now = state_at(state, step, x, b, a, j, T)
                decay = decay_of(row(step, j, T)[None, :] * a)
                of_b, of_c = row(b, j, T)[:, None], row(c, j, T)[:, None]
                of_x, of_dy = row(x, j, T)[None, :], row(dy, j, T)[None, :]
                after = decay * now + of_b * of_x
                dnow += of_c * of_dy
                exponents = dnow * now * decay
                da += exponents * row(step, j, T)[None, :]
                if GATE:
                    y = tl.where(rows == j, tl.sum(of_c * after, axis=0)[None, :], y)
                dc = tl.where(rows == j, tl.sum(after * of_dy, axis=1)[None, :], dc)
                db = tl.where(rows == j, tl.sum(dnow * of_x, axis=1)[None, :], db)
                dx = tl.where(rows == j, tl.sum(dnow * of_b, axis=0)[None, :], dx)
                ddt = tl.where(rows == j, rate_sums(exponents, a)[None, :], ddt)
                dnow *= decay
            own, part = batch * seq * CHANNELS, (batch * PARTS + item % PARTS) * seq * N
            if GATE:
                dz = grad * (y + u * skip) * (half * (1.0 + z * (1.0 - half)))
                put_rows(dz_ptr + own, CHANNELS, first, seq, low, dz, CHANNELS, T, COLUMNS)
            put_rows(dc_ptr + part, N, first, seq, 0, dc, N, T, WIDE)
            put_rows(db_ptr + part, N, first, seq, 0, db, N, T, WIDE)
            put_rows(du_ptr + own, CHANNELS, first, seq, low, dx * step + dy * skip, CHANNELS, T, COLUMNS)
            ddt += dx * u
            if SOFTPLUS:
                ddt *= tl.where(raw > 20.0, 1.0, tl.sigmoid(raw))
            put_rows(ddt_ptr + own, CHANNELS, first, seq, low, ddt, CHANNELS, T, COLUMNS)
            dskip += tl.sum(dy * u, axis=0)
            dbias += tl.sum(tl.where(rows < seq - first, ddt, 0.0), axis=0)
        channels = low + tl.arange(0, COLUMNS)
        tl.store(da_ptr + batch * N * CHANNELS + here, da, mask=inside)
        tl.store(dskip_ptr + batch * CHANNELS + channels, dskip, mask=channels < CHANNELS)
        tl.store(dbias_ptr + batch * CHANNELS + channels, dbias, mask=channels < CHANNELS)
        tl.store(dstate_ptr + batch * N * CHANNELS + here, dnow, mask=inside)


def backward(
    grad: Tensor,
    grad_state: Tensor | None,
    starts: Tensor,
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
) -> tuple[Tensor, ...]:
    """``mindspeed::selective_scan_backward``: gradients of u, dt, A, B, C, D, z, bias and of the state at the start."""
    definition.check(u, dt, A, B, C, D, z, bias, state)
    final, kept = definition.fake(u, dt, A, B, C, D, z, bias, state, softplus)[1:]
    wanted = {"grad": (grad, u.shape), "grad_state": (grad_state, final.shape), "starts": (starts, kept.shape)}
    check_shapes("selective_scan_backward", wanted)
    results = definition.fake_backward(grad, grad_state, starts, u, dt, A, B, C, D, z, bias, state, softplus)
    du, ddt, dA, dB, dC, dD, dz, dbias, dstate = results
    sizes = Sizes(u, dt, A, B, C, D, z, bias, softplus)
    if not sizes.tiles:
        dstate.zero_() if grad_state is None else dstate.copy_(grad_state)
        return *(x.zero_() for x in results[:-1]), dstate
    grad, starts = by_row(grad), starts.contiguous()

    def new(*shape: int) -> Tensor:
        return u.new_empty((sizes.batch, *shape), dtype=torch.float32)

    n, channels = starts.shape[2:]
    last = None if grad_state is None else grad_state.transpose(1, 2).contiguous()
    first, of_tokens = new(n, channels), [du, ddt, du if z is None else dz]
    if only_cuda(u):
        db, dc, da, dskip, dshift = segment_gradients.start(sizes, grad, last, starts, of_tokens, first)
    else:
        db, dc = (new(sizes.parts, sizes.seq, n) for _ in "BC")
        da, dskip, dshift = new(n, channels), new(channels), new(channels)
        launch(
            selective_scan_gradients,
            programs(u, sizes.count, WARPS, 16),
            *sizes.arguments, grad, first if last is None else last, starts, *of_tokens, db, dc, da, dskip, dshift,
            first, sizes.count, sizes.seq, sizes.tiles, starts.shape[1], *sizes.strides,
            grad.stride(0), grad.stride(2),
            num_warps=WARPS, STATE=last is not None, **sizes.walk, **sizes.constants,
        )  # fmt: skip
    dA.copy_(da.sum(0).t())
    dstate.copy_(first.transpose(1, 2))
    for x, part in ((dB, db), (dC, dc)):
        x.copy_(part.sum(1).transpose(1, 2))
    for x, into, part in ((D, dD, dskip), (bias, dbias, dshift)):
        if x is not None:
            into.copy_(part.sum(0))
    return results
