"""Gradients of the selective scan on cuda: a program walks back through the tokens of a segment with some channels.

Of each chunk the states before every HELD tokens are made first and laid aside in memory of the program; of HELD tokens
the states are held in registers: each state is made twice, and its decay once more. What several programs have of one
gradient is summed after: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.selective_scan import CHUNK
from mindspeed_fx.kernels.triton.launch import launch, programs
from mindspeed_fx.kernels.triton.selective_scan_segments import (
    SIZES,
    WARPS,
    Segments,
    Sizes,
    decay_of,
    of_channels,
    put_row,
    rate_sums,
    rates_of,
    step_of,
    token_rows,
)

HELD = 2
"""Tokens whose states are held in registers; half as many of states that are more than 16 wide. Divides CHUNK."""
RESIDENT = 16
"""Warps of a multiprocessor for which a sequence is split; registers are for eight at a time. Measured, as HELD:
benchmarks/results/2026-11-27-gpu_sweeps.txt."""


@triton.jit
def state_after(state, a, step, u, b):
    """The state [n, COLUMNS] after a token."""
    return decay_of(step[None, :] * a) * state + b[:, None] * (step * u)[None, :]


@triton.jit
def lay_aside(
    aside, state, a, u, u1, dt, s1, bias, b, b1, first, seq, low, CHANNELS: tl.constexpr, N: tl.constexpr,
    SOFTPLUS: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write the states before every HELD tokens of the chunk that begins with ``first``."""
    tl.debug_barrier()
    for piece in range(0, CHUNK // HELD - 1):
        tl.store(aside + piece * WIDE * COLUMNS, state)
        begin = first + piece * HELD
        us = token_rows(u, u1, begin, seq, low, CHANNELS, HELD, COLUMNS, True)
        raws = token_rows(dt, s1, begin, seq, low, CHANNELS, HELD, COLUMNS, True)
        bs = token_rows(b, b1, begin, seq, 0, N, HELD, WIDE, True)
        for j in tl.static_range(0, HELD):
            state = state_after(state, a, step_of(raws[j] + bias, begin + j < seq, SOFTPLUS), us[j], bs[j])
    tl.store(aside + (CHUNK // HELD - 1) * WIDE * COLUMNS, state)
    tl.debug_barrier()


@triton.jit
def hold(state, a, us, raws, bias, bs, first, seq, SOFTPLUS: tl.constexpr, HELD: tl.constexpr):
    """(the states before, the steps of) HELD tokens from ``first`` on."""
    states, steps = (), ()
    for j in tl.static_range(0, HELD):
        step = step_of(raws[j] + bias, first + j < seq, SOFTPLUS)
        states, steps = states + (state,), steps + (step,)
        state = state_after(state, a, step, us[j], bs[j])
    return states, steps


@triton.jit
def token_gradients(dnow, da, state, a, step, x, b, c, dy):
    """(the gradient of the state before a token, that of A so far, those of B, C and x, that of the step through the
    decay, y) from the gradient of the state after the token but for this token's y, and the state before it."""
    decay = decay_of(step[None, :] * a)
    passed = decay * state
    after = passed + b[:, None] * x[None, :]
    dnow += c[:, None] * dy[None, :]
    exponents = dnow * passed
    da += exponents * step[None, :]
    db, dc = tl.sum(dnow * x[None, :], axis=1), tl.sum(after * dy[None, :], axis=1)
    dx, dstep = tl.sum(dnow * b[:, None], axis=0), rate_sums(exponents, a)
    return dnow * decay, da, db, dc, dx, dstep, tl.sum(c[:, None] * after, axis=0)


@triton.jit(do_not_specialize=SIZES)
def selective_scan_segment_gradients(
    u_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, z_ptr, bias_ptr, grad_ptr, last_ptr, starts_ptr, aside_ptr, du_ptr,
    ddt_ptr, dz_ptr, db_ptr, dc_ptr, da_ptr, dskip_ptr, dbias_ptr, dstate_ptr, count, seq, chunks, segments, each,
    u0, u1, s0, s1, b0, b1, c0, c1, z0, z1, g0, g1,
    CHANNELS: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    STATE: tl.constexpr, SOFTPLUS: tl.constexpr, HELD: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of u, dt and z [batch, seq, CHANNELS]; of B and C from each part of channels [batch, PARTS, seq, N];
    of A, D and the bias from each segment of ``each`` chunks, and of the first state [batch, N, CHANNELS]. ``last`` are
    those of the states after segments [batch, segments, N, CHANNELS]."""
    PARTS: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    PIECES: tl.constexpr = CHUNK // HELD
    wide = tl.arange(0, WIDE)[:, None]
    aside = aside_ptr + tl.cast(tl.program_id(0), tl.int64) * PIECES * WIDE * COLUMNS
    aside += wide * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        batch, segment = line // segments, tl.cast(line % segments, tl.int32)
        at = low + tl.arange(0, COLUMNS)
        here, inside = wide * CHANNELS + at[None, :], (wide < N) & (at[None, :] < CHANNELS)
        a = rates_of(a_ptr, here, inside)
        dnow, da = a * 0.0, a * 0.0
        if STATE:
            dnow = tl.load(last_ptr + line * N * CHANNELS + here, mask=inside, other=0.0).to(tl.float32)
        bias = of_channels(bias_ptr, low, CHANNELS, BIAS, COLUMNS, True)
        skip = of_channels(d_ptr, low, CHANNELS, SKIP, COLUMNS, True)
        dskip, dbias = bias * 0.0, bias * 0.0
        u, dt, b, c = u_ptr + batch * u0, dt_ptr + batch * s0, b_ptr + batch * b0, c_ptr + batch * c0
        grad, z = grad_ptr + batch * g0, z_ptr + batch * z0
        own, part = batch * seq * CHANNELS, (batch * PARTS + item % PARTS) * seq * N
        chunk = tl.minimum((segment + 1) * each, chunks) - 1
        while chunk >= segment * each:
            state = tl.load(starts_ptr + (batch * chunks + chunk) * N * CHANNELS + here, mask=inside, other=0.0)
            lay_aside(
                aside, state, a, u, u1, dt, s1, bias, b, b1, chunk * CHUNK, seq, low, CHANNELS, N, SOFTPLUS, HELD,
                CHUNK, WIDE, COLUMNS,
            )  # fmt: skip
            for back in range(0, PIECES):
                piece = PIECES - 1 - back
                first = chunk * CHUNK + piece * HELD
                state = tl.load(aside + piece * WIDE * COLUMNS)
                us = token_rows(u, u1, first, seq, low, CHANNELS, HELD, COLUMNS, True)
                raws = token_rows(dt, s1, first, seq, low, CHANNELS, HELD, COLUMNS, True)
                bs = token_rows(b, b1, first, seq, 0, N, HELD, WIDE, True)
                cs = token_rows(c, c1, first, seq, 0, N, HELD, WIDE, True)
                grads = token_rows(grad, g1, first, seq, low, CHANNELS, HELD, COLUMNS, True)
                gates = grads
                if GATE:
                    gates = token_rows(z, z1, first, seq, low, CHANNELS, HELD, COLUMNS, True)
                states, steps = hold(state, a, us, raws, bias, bs, first, seq, SOFTPLUS, HELD)
                for j in tl.static_range(HELD - 1, -1, -1):
                    token, dy = first + j, grads[j]
                    if GATE:
                        half = tl.sigmoid(gates[j])
                        dy *= gates[j] * half
                    dnow, da, db, dc, dx, dstep, y = token_gradients(
                        dnow, da, states[j], a, steps[j], steps[j] * us[j], bs[j], cs[j], dy
                    )
                    put_row(dc_ptr + part, N, token, seq, 0, dc, N, WIDE, True)
                    put_row(db_ptr + part, N, token, seq, 0, db, N, WIDE, True)
                    put_row(du_ptr + own, CHANNELS, token, seq, low, dx * steps[j] + dy * skip, CHANNELS, COLUMNS, True)
                    if GATE:
                        dz = grads[j] * (y + us[j] * skip) * (half * (1.0 + gates[j] * (1.0 - half)))
                        put_row(dz_ptr + own, CHANNELS, token, seq, low, dz, CHANNELS, COLUMNS, True)
                    dstep += dx * us[j]
                    if SOFTPLUS:
                        dstep *= tl.where(raws[j] + bias > 20.0, 1.0, tl.sigmoid(raws[j] + bias))
                    put_row(ddt_ptr + own, CHANNELS, token, seq, low, dstep, CHANNELS, COLUMNS, True)
                    dskip += dy * us[j]
                    dbias += tl.where(token < seq, dstep, 0.0)
            chunk -= 1
        tl.store(da_ptr + line * N * CHANNELS + here, da, mask=inside)
        tl.store(dskip_ptr + line * CHANNELS + at, dskip, mask=at < CHANNELS)
        tl.store(dbias_ptr + line * CHANNELS + at, dbias, mask=at < CHANNELS)
        if segment == 0:
            tl.store(dstate_ptr + batch * N * CHANNELS + here, dnow, mask=inside)


def start(
    sizes: Sizes, grad: Tensor, grad_state: Tensor | None, starts: Tensor, of_tokens: list[Tensor], first: Tensor
) -> tuple[Tensor, ...]:
    """Start the kernel.

    Args:
        grad_state: the gradient of the last state [batch, N, CHANNELS].
        of_tokens: what gradients of u, dt and z are written to.
        first: what that of the first state is written to.

    Returns:
        the gradients of B and C from each part of channels, of A, D and the bias from each segment.
    """
    segments, u = Segments(sizes, RESIDENT), sizes.arguments[0]
    last = segments.states(grad_state, grad)
    count, (n, channels) = sizes.count * segments.number, first.shape[1:]
    grid = programs(u, count, WARPS, RESIDENT)
    held = HELD if sizes.constants["WIDE"] <= 16 else HELD // 2

    def new(*shape: int) -> Tensor:
        return u.new_empty(shape, dtype=torch.float32)

    shares = [new(sizes.batch, sizes.parts, sizes.seq, n) for _ in "BC"]
    sums = [new(sizes.batch * segments.number, *shape) for shape in ((n, channels), (channels,), (channels,))]
    aside = new(grid, CHUNK // held, sizes.constants["WIDE"], sizes.constants["COLUMNS"])
    launch(
        selective_scan_segment_gradients,
        grid,
        *sizes.arguments, grad, first if last is None else last, starts, aside, *of_tokens, *shares, *sums, first,
        count, sizes.seq, starts.shape[1], segments.number, segments.chunks, *sizes.strides,
        grad.stride(0), grad.stride(2),
        num_warps=WARPS, STATE=last is not None, HELD=held, CHUNK=CHUNK, **sizes.constants,
    )  # fmt: skip
    return *shares, *sums
