"""Where a sequence is split for the selective scan in Triton, so that more programs go through it than there are parts
of channels: the state before each segment, or from the right the gradient of the state after it.

What a segment makes of a state h at its start is e^(A s) h + e: s is the sum of its steps, e its end from a state of
zeros. One kernel finds e and s of all segments, a second goes over the segments. The gradient of the state, from the
right, is the same with C dy in the place of B x: it needs no states.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.selective_scan import CHUNK
from mindspeed_fx.kernels.triton.launch import launch, only_cuda, power_of_two, programs
from mindspeed_fx.kernels.triton.recurrence import ASCEND

TOKENS = 8
"""Of a tile on an NPU; divides CHUNK, the tokens between states that are kept."""
COLUMNS = 32
"""Channels of a program."""
WARPS = 1
"""No sum over states or channels then leaves a warp."""
AHEAD = 2
"""Tokens of a tile on cuda; divides CHUNK. There each has a row of its own: to choose one of a tile takes a sum."""
SIZES = ["count", "seq", "tiles", "chunks", "segments", "each"]
"""Arguments of which no kernel is to be compiled anew."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def rates_of(base, here, inside):
    """A [N, CHANNELS] at ``here`` for :func:`decay_of`."""
    a = tl.load(base + here, mask=inside, other=0.0).to(tl.float32)
    if not ASCEND:
        a *= LOG2E
    return a


@triton.jit
def decay_of(exponents):
    """e to what :func:`rates_of` gave, times steps: powers of two are cuda's, those of e take a product more each and
    two for results below 2^-126, which are zero here."""
    if ASCEND:
        decay = tl.exp(exponents)
    else:
        decay = tl.exp2(exponents)
    return decay


@triton.jit
def rate_sums(x, a):
    """The sum of x A over the states, A as of :func:`rates_of`."""
    total = tl.sum(x * a, axis=0)
    if not ASCEND:
        total *= 1.0 / LOG2E
    return total


@triton.jit
def softplus(raw):
    """log1p(e) is log(w) e / (w - 1) with w = 1 + e, whose roundings cancel."""
    e = tl.exp(tl.minimum(raw, 20.0))
    w = 1.0 + e
    return tl.where(raw <= 20.0, tl.where(w == 1.0, e, tl.log(w) * (e / (w - 1.0))), raw)


@triton.jit
def columns(low, COLUMNS: tl.constexpr, FLAT: tl.constexpr):
    """Numbers of columns from ``low`` on, FLAT [COLUMNS] or [1, COLUMNS]. In upstream Triton the shape that tokens
    are read in decides who has the states [n, COLUMNS] of a warp: with [1, COLUMNS] each thread has all of its
    channels, and sums over states stay inside; else, as float32 is read, four threads share channels, and sums over
    states and over channels cost the same."""
    at = low + tl.arange(0, COLUMNS)
    if not FLAT:
        at = at[None, :]
    return at


@triton.jit
def token_rows(
    base, stride, first, seq, low, WIDTH: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr
):
    """Rows of T tokens from ``first`` on, in float32, zeros beyond the sequence; ``base`` is that of the batch. All are
    read before anything waits for one."""
    at = columns(low, COLUMNS, FLAT)
    base += tl.cast(first, tl.int64) * stride
    rows = ()
    for j in tl.static_range(0, T):
        row = tl.load(base + j * stride + at, mask=at < tl.where(first + j < seq, WIDTH, 0), other=0.0)
        rows = rows + (row.to(tl.float32),)
    return rows


@triton.jit
def put_row(base, stride, token, seq, low, x, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr):
    """Write x where :func:`token_rows` would read the row of a token, in the type that lies there."""
    at, base = columns(low, COLUMNS, FLAT), base + tl.cast(token, tl.int64) * stride
    tl.store(base + at, x.to(base.dtype.element_ty), mask=at < tl.where(token < seq, WIDTH, 0))


@triton.jit
def of_channels(base, low, CHANNELS: tl.constexpr, GIVEN: tl.constexpr, COLUMNS: tl.constexpr, FLAT: tl.constexpr):
    """The bias, say, of some channels; zeros if it is not given."""
    at = columns(low, COLUMNS, FLAT)
    row = tl.zeros(at.shape, tl.float32)
    if GIVEN:
        row = tl.load(base + at, mask=at < CHANNELS, other=0.0).to(tl.float32)
    return row


@triton.jit
def step_of(raw, is_there, SOFTPLUS: tl.constexpr):
    """The step of dt plus the bias; none if the token is not there, which leaves the state alone."""
    if SOFTPLUS:
        raw = softplus(raw)
    return tl.where(is_there, raw, 0.0)


@triton.jit(do_not_specialize=SIZES)
def selective_scan_ends(
    x_ptr, dt_ptr, a_ptr, b_ptr, z_ptr, bias_ptr, ends_ptr, sums_ptr, count, seq, segments, each,
    x0, x1, s0, s1, b0, b1, z0, z1,
    CHANNELS: tl.constexpr, N: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    TURNED: tl.constexpr, AHEAD: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Of each segment of ``each`` tokens but the last: the state at its end from zeros [batch, segments, N, CHANNELS]
    and the sum of steps. TURNED: of each but the first the gradient of the state at its start; x is that of the
    result, b is C."""
    PARTS: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    FIRST: tl.constexpr = AHEAD - 1 if TURNED else 0
    END: tl.constexpr = -1 if TURNED else AHEAD
    TURN: tl.constexpr = -1 if TURNED else 1
    wide = tl.arange(0, WIDE)[:, None]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        batch, segment = line // (segments - 1), tl.cast(line % (segments - 1), tl.int32)
        if TURNED:
            segment += 1
        at = low + tl.arange(0, COLUMNS)[None, :]
        here, inside = wide * CHANNELS + at, (wide < N) & (at < CHANNELS)
        a = rates_of(a_ptr, here, inside)
        bias = of_channels(bias_ptr, low, CHANNELS, BIAS, COLUMNS, False)
        state, total = a * 0.0, bias * 0.0
        pieces = (tl.minimum((segment + 1) * each, seq) - segment * each + AHEAD - 1) // AHEAD
        for turn in range(0, pieces):
            piece = turn
            if TURNED:
                piece = pieces - 1 - turn
            first = segment * each + piece * AHEAD
            raws = token_rows(dt_ptr + batch * s0, s1, first, seq, low, CHANNELS, AHEAD, COLUMNS, False)
            xs = token_rows(x_ptr + batch * x0, x1, first, seq, low, CHANNELS, AHEAD, COLUMNS, False)
            bs = token_rows(b_ptr + batch * b0, b1, first, seq, 0, N, AHEAD, WIDE, True)
            zs = xs
            if TURNED and GATE:
                zs = token_rows(z_ptr + batch * z0, z1, first, seq, low, CHANNELS, AHEAD, COLUMNS, False)
            for j in tl.static_range(FIRST, END, TURN):
                step = step_of(raws[j] + bias, first + j < seq, SOFTPLUS)
                x = xs[j]
                if TURNED:
                    if GATE:
                        x *= zs[j] * tl.sigmoid(zs[j])
                    state = decay_of(step * a) * (state + bs[j][:, None] * x)
                else:
                    state = decay_of(step * a) * state + bs[j][:, None] * (step * x)
                total += step
        own = batch * segments + segment
        tl.store(ends_ptr + own * N * CHANNELS + here, state, mask=inside)
        tl.store(sums_ptr + own * CHANNELS + at, total, mask=at < CHANNELS)


@triton.jit(do_not_specialize=SIZES)
def selective_scan_between(
    a_ptr, first_ptr, ends_ptr, sums_ptr, states_ptr, count, segments,
    CHANNELS: tl.constexpr, N: tl.constexpr, STATE: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """The state before each segment from the first [batch, N, CHANNELS] and :func:`selective_scan_ends`; TURNED: the
    gradient of the state after each, from the last."""
    PARTS: tl.constexpr = (CHANNELS + COLUMNS - 1) // COLUMNS
    wide = tl.arange(0, WIDE)[:, None]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        batch, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        at = low + tl.arange(0, COLUMNS)
        here, inside = wide * CHANNELS + at[None, :], (wide < N) & (at[None, :] < CHANNELS)
        a = rates_of(a_ptr, here, inside)
        state = a * 0.0
        if STATE:
            state = tl.load(first_ptr + batch * N * CHANNELS + here, mask=inside, other=0.0).to(tl.float32)
        segment = batch * segments
        if TURNED:
            segment += segments - 1
        for _ in range(1, segments):
            tl.store(states_ptr + segment * N * CHANNELS + here, state, mask=inside)
            total = tl.load(sums_ptr + segment * CHANNELS + at, mask=at < CHANNELS, other=0.0)
            end = tl.load(ends_ptr + segment * N * CHANNELS + here, mask=inside, other=0.0)
            state = decay_of(total[None, :] * a) * state + end
            if TURNED:
                segment -= 1
            else:
                segment += 1
        tl.store(states_ptr + segment * N * CHANNELS + here, state, mask=inside)


def by_row(x: Tensor) -> Tensor:
    """``x`` [batch, width, seq] with what belongs to a token side by side: what is laid out otherwise is copied."""
    return x if x.stride(1) == 1 else x.transpose(1, 2).contiguous().transpose(1, 2)


class Sizes:
    """Tiles of a call, its arguments by row, and what the kernels are given."""

    def __init__(self, u, dt, A, B, C, D, z, bias, softplus):
        (self.batch, channels, self.seq), n = u.shape, A.shape[1]
        apart = only_cuda(u)
        tokens = AHEAD if apart else TOKENS
        self.tiles, self.parts, self.span = -(-self.seq // tokens), -(-channels // COLUMNS), CHUNK // tokens
        self.count = self.batch * self.parts
        of_tokens = [by_row(x) for x in (u, dt, B, C, u if z is None else z)]
        u, dt, B, C, z_or_u = of_tokens
        a = A.t().contiguous()
        self.arguments = (u, dt, a, B, C, a if D is None else D.contiguous(), z_or_u)
        self.arguments += (a if bias is None else bias.contiguous(),)
        self.strides = [n for x in of_tokens for n in (x.stride(0), x.stride(2))]
        self.constants: dict[str, Any] = {
            "CHANNELS": channels, "N": n, "SKIP": D is not None, "GATE": z is not None, "BIAS": bias is not None,
            "SOFTPLUS": softplus, "WIDE": power_of_two(n), "COLUMNS": COLUMNS,
        }  # fmt: skip
        self.walk = {"T": tokens, "SPAN": self.span}
        self.apart = apart


def chunks_of_segment(u: Tensor, count: int, chunks: int, resident: int) -> int:
    """Chunks of a segment: as few as give every multiprocessor ``resident`` warps and not more, for segments cost a
    pass more each; ``count`` programs go through one segment. Cores of an NPU are few: one segment."""
    if not only_cuda(u):
        return chunks
    number = max(1, programs(u, count * chunks, WARPS, resident) // count)
    return -(-chunks // number)


class Segments:
    """How a sequence is split: ``number`` segments of ``chunks`` chunks, the last of what is left."""

    def __init__(self, sizes, resident: int):
        """``resident``: warps that a processor is to have."""
        self.sizes, u = sizes, sizes.arguments[0]
        all_chunks = -(-sizes.tiles // sizes.span)
        self.chunks = chunks_of_segment(u, sizes.count, all_chunks, resident)
        self.number = -(-all_chunks // self.chunks)

    def states(self, first: Tensor | None, grad: Tensor | None = None) -> Tensor | None:
        """The state before each segment [batch, segments, N, CHANNELS] from the first [batch, N, CHANNELS], None:
        zeros; with the gradient of the result, from that of the last state, the gradient of the state after each.
        """
        if self.number == 1:
            return first
        sizes, turned = self.sizes, grad is not None
        u, dt, a, b, c, _, z, bias = sizes.arguments
        x, columns = (u, b) if grad is None else (grad, c)
        keys = ("CHANNELS", "N", "WIDE", "COLUMNS")
        shared = {"TURNED": turned, **{k: sizes.constants[k] for k in keys}}
        options = {k: sizes.constants[k] for k in ("GATE", "BIAS", "SOFTPLUS")}
        shape = sizes.batch, self.number, *a.shape
        ends, states = (a.new_empty(shape, dtype=torch.float32) for _ in range(2))
        sums = ends.new_empty((*shape[:2], a.shape[1]))
        count = sizes.count * (self.number - 1)
        launch(
            selective_scan_ends,
            programs(u, count, WARPS, None),
            x, dt, a, columns, z, bias, ends, sums, count, sizes.seq, self.number, self.chunks * CHUNK,
            *(x.stride(i) for x in (x, dt, columns, z) for i in (0, 2)),
            num_warps=WARPS, AHEAD=AHEAD, **options, **shared,
        )  # fmt: skip
        launch(
            selective_scan_between,
            programs(u, sizes.count, WARPS, None),
            a, ends if first is None else first, ends, sums, states, sizes.count, self.number,
            num_warps=WARPS, STATE=first is not None, **shared,
        )  # fmt: skip
        return states
