"""Gradients of the state space dual in Triton: the states of all tiles again from those kept, a walk back through the
gradients of states, then all else for every tile at once.

Formulas as in mindspeed_fx/kernels/ssd_chunks.py, tiles as in ssd.py. Some heads that share B and C add their gradients
in one program; what several programs have of one gradient is summed after: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import ssd as definition
from mindspeed_fx.kernels.recurrence import check_shapes
from mindspeed_fx.kernels.triton.launch import launch, programs
from mindspeed_fx.kernels.triton.recurrence import (
    STAGES,
    WARPS,
    decays,
    last_of,
    numbers_of,
    product,
    rows_of,
    sums_after,
    sums_before,
    warps_of,
)
from mindspeed_fx.kernels.triton.ssd import Sizes, tight

TOGETHER = 16
"""Heads whose gradients of B and C one program adds at most."""
STEP_WARPS = 4
"""Most warps of the kernel with most tiles at a time, which takes 16 columns at once: with more of either, registers
spill."""


@triton.jit
def ssd_spans(
    x_ptr, dt_ptr, a_ptr, b_ptr, starts_ptr, states_ptr, count, seq, tiles, spans, x0, x1, x2, s0, s1, s2, b0, b1, b2,
    X_HEADS: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NARROW: tl.constexpr,
    T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """The state before each tile [tiles, P, WIDE]; a span's come from its first."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = (P + COLUMNS - 1) // COLUMNS
    width = tl.arange(0, WIDE)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, span = tl.cast(item // PARTS // spans, tl.int64), item // PARTS % spans
        batch, head, low = line // X_HEADS, line % X_HEADS, (item % PARTS) * COLUMNS
        own = low + tl.arange(0, COLUMNS)[:, None]
        rate = tl.load(a_ptr + head).to(tl.float32)
        start = starts_ptr + ((batch * spans + span) * X_HEADS + head) * P * N
        state = tl.load(start + own * N + width, mask=(own < P) & (width < N), other=0.0)
        for tile in tl.range(span * SPAN, min(span * SPAN + SPAN, tiles), num_stages=STAGES):
            first, into = tile * T, states_ptr + (line * tiles + tile) * P * WIDE
            tl.store(into + own * WIDE + width, state.to(states_ptr.dtype.element_ty), mask=own < P)
            dt = numbers_of(dt_ptr + batch * s0 + head * s2, s1, first, seq, T)
            sums = sums_before(dt * rate, T)
            last = last_of(sums, T)
            b = rows_of(b_ptr + batch * b0 + head // SHARED * b2, b1, first, seq, 0, N, T, WIDE)
            x = rows_of(x_ptr + batch * x0 + head * x2, x1, first, seq, low, P, T, COLUMNS).to(tl.float32)
            x *= (dt * tl.exp(last - sums))[:, None]
            state = state * tl.exp(last) + product(tl.trans(x), b, NARROW, TYPE)


@triton.jit
def ssd_back(
    grad_ptr, dt_ptr, a_ptr, c_ptr, last_ptr, dstates_ptr, dstate_ptr, count, seq, tiles, g0, g1, g2, s0, s1, s2, c0,
    c1, c2, X_HEADS: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, STATE: tl.constexpr,
    NARROW: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of the state after each tile [tiles, P, WIDE], and of the first."""
    TYPE: tl.constexpr = c_ptr.dtype.element_ty
    PARTS: tl.constexpr = (P + COLUMNS - 1) // COLUMNS
    width = tl.arange(0, WIDE)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        batch, head, own = line // X_HEADS, line % X_HEADS, low + tl.arange(0, COLUMNS)[:, None]
        here, inside = own * N + width, (own < P) & (width < N)
        rate = tl.load(a_ptr + head).to(tl.float32)
        dstate = (own * 0 + width * 0).to(tl.float32)
        if STATE:
            dstate = tl.load(last_ptr + line * P * N + here, mask=inside, other=0.0).to(tl.float32)
        for step in tl.range(0, tiles, num_stages=STAGES):
            tile = tiles - 1 - step
            first, into = tile * T, dstates_ptr + (line * tiles + tile) * P * WIDE
            tl.store(into + own * WIDE + width, dstate.to(dstates_ptr.dtype.element_ty), mask=own < P)
            sums = sums_before(numbers_of(dt_ptr + batch * s0 + head * s2, s1, first, seq, T) * rate, T)
            grad = rows_of(grad_ptr + batch * g0 + head * g2, g1, first, seq, low, P, T, COLUMNS).to(tl.float32)
            grad *= tl.exp(sums)[:, None]
            c = rows_of(c_ptr + batch * c0 + head // SHARED * c2, c1, first, seq, 0, N, T, WIDE)
            dstate = dstate * tl.exp(last_of(sums, T)) + product(tl.trans(grad), c, NARROW, TYPE)
        tl.store(dstate_ptr + line * P * N + here, dstate.to(dstate_ptr.dtype.element_ty), mask=inside)


@triton.jit
def ssd_step_gradients(
    grad_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, states_ptr, dstates_ptr, dx_ptr, ddt_ptr, drates_ptr,
    dskips_ptr, count, seq, tiles, g0, g1, g2, x0, x1, x2, s0, s1, s2, b0, b1, b2, c0, c1, c2,
    X_HEADS: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr,
    NARROW: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of x [batch, seq, X_HEADS, P] and dt; of A and D for each tile [batch, X_HEADS, tiles]."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    rows, cols, width = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, WIDE)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, line = (item % tiles) * T, item // tiles
        batch, head = tl.cast(line // X_HEADS, tl.int64), tl.cast(line % X_HEADS, tl.int64)
        b = rows_of(b_ptr + batch * b0 + head // SHARED * b2, b1, first, seq, 0, N, T, WIDE)
        c = rows_of(c_ptr + batch * c0 + head // SHARED * c2, c1, first, seq, 0, N, T, WIDE)
        dt = numbers_of(dt_ptr + batch * s0 + head * s2, s1, first, seq, T)
        rate = tl.load(a_ptr + head).to(tl.float32)
        sums = sums_before(dt * rate, T)
        last, grow = last_of(sums, T), tl.exp(sums)[:, None]
        scores = product(c, tl.trans(b), NARROW, TYPE) * decays(sums, T)
        dscores = (rows * 0 + cols * 0).to(tl.float32)
        ddt, dsums, kept = dt * 0.0, dt * 0.0, dt * 0.0
        dlast, dskip = 0.0, 0.0
        for low in tl.range(0, P, COLUMNS, num_stages=STAGES):
            at, own = low + tl.arange(0, COLUMNS)[None, :], low + tl.arange(0, COLUMNS)[:, None]
            grad = rows_of(grad_ptr + batch * g0 + head * g2, g1, first, seq, low, P, T, COLUMNS).to(tl.float32)
            x = rows_of(x_ptr + batch * x0 + head * x2, x1, first, seq, low, P, T, COLUMNS).to(tl.float32)
            here = tl.cast(item, tl.int64) * P * WIDE + own * WIDE + width
            state = tl.load(states_ptr + here, mask=own < P, other=0.0)
            dstate = tl.load(dstates_ptr + here, mask=own < P, other=0.0)
            dlast += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
            dsums += tl.sum(product(c, tl.trans(state), NARROW, TYPE) * grad * grow, axis=1)
            dscores += product(grad, tl.trans(x * dt[:, None]), NARROW, TYPE)
            dsteps = product(b, tl.trans(dstate), NARROW, TYPE) * tl.exp(last - sums)[:, None]
            kept += tl.sum(dsteps * x, axis=1) * dt
            dsteps += product(tl.trans(scores), grad, NARROW, TYPE)
            ddt += tl.sum(dsteps * x, axis=1)
            dx = dsteps * dt[:, None]
            if SKIP:
                dx += grad * tl.load(d_ptr + head).to(tl.float32)
                dskip += tl.sum(tl.sum(grad * x, axis=1), axis=0)
            dx_at = dx_ptr + ((batch * seq + first) * X_HEADS + head) * P + rows * (X_HEADS * P) + at
            tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=(rows < seq - first) & (at < P))
        pairs = tl.where(rows > cols, dscores * scores, 0.0)
        dsums += tl.sum(pairs - tl.trans(pairs), axis=1) - kept
        whole = tl.sum(kept, axis=0) + dlast * tl.exp(last)
        dsums = sums_after(dsums + tl.where(tl.arange(0, T) == T - 1, whole, 0.0), T)
        ddt_at = ddt_ptr + (batch * seq + first) * X_HEADS + head + tl.arange(0, T) * X_HEADS
        tl.store(ddt_at, (ddt + dsums * rate).to(ddt_ptr.dtype.element_ty), mask=tl.arange(0, T) < seq - first)
        tl.store(drates_ptr + item, tl.sum(dsums * dt, axis=0))
        if SKIP:
            tl.store(dskips_ptr + item, dskip)


@triton.jit
def ssd_group_gradients(
    grad_ptr, x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, states_ptr, dstates_ptr, db_ptr, dc_ptr, count, seq, tiles,
    g0, g1, g2, x0, x1, x2, s0, s1, s2, b0, b1, b2, c0, c1, c2,
    X_HEADS: tl.constexpr, SHARED: tl.constexpr, TOGETHER: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    NARROW: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of B and C of each block of TOGETHER heads [batch, seq, groups, blocks, N]."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = (SHARED + TOGETHER - 1) // TOGETHER
    WHOLE: tl.constexpr = X_HEADS // SHARED * BLOCKS
    rows, cols, width = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, WIDE)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        block, line = item % WHOLE, item // WHOLE
        group, tile, batch = block // BLOCKS, line % tiles, tl.cast(line // tiles, tl.int64)
        first, low_head = tile * T, group * SHARED + block % BLOCKS * TOGETHER
        dproducts = (rows * 0 + cols * 0).to(tl.float32)
        db = (rows * 0 + width * 0).to(tl.float32)
        dc = db
        for number in range(low_head, min(low_head + TOGETHER, group * SHARED + SHARED)):
            head = tl.cast(number, tl.int64)
            dt = numbers_of(dt_ptr + batch * s0 + head * s2, s1, first, seq, T)
            sums = sums_before(dt * tl.load(a_ptr + head).to(tl.float32), T)
            dscores = (rows * 0 + cols * 0).to(tl.float32)
            for low in tl.range(0, P, COLUMNS, num_stages=STAGES):
                own = low + tl.arange(0, COLUMNS)[:, None]
                grad = rows_of(grad_ptr + batch * g0 + head * g2, g1, first, seq, low, P, T, COLUMNS).to(tl.float32)
                x = rows_of(x_ptr + batch * x0 + head * x2, x1, first, seq, low, P, T, COLUMNS) * dt[:, None]
                dscores += product(grad, tl.trans(x), NARROW, TYPE)
                here = ((batch * X_HEADS + head) * tiles + tile) * P * WIDE + own * WIDE + width
                state = tl.load(states_ptr + here, mask=own < P, other=0.0)
                dc += product(grad * tl.exp(sums)[:, None], state, NARROW, TYPE)
                dstate = tl.load(dstates_ptr + here, mask=own < P, other=0.0)
                db += product(x * tl.exp(last_of(sums, T) - sums)[:, None], dstate, NARROW, TYPE)
            dproducts += dscores * decays(sums, T)
        b = rows_of(b_ptr + batch * b0 + group * b2, b1, first, seq, 0, N, T, WIDE)
        dc += product(dproducts, b, NARROW, TYPE)
        c = rows_of(c_ptr + batch * c0 + group * c2, c1, first, seq, 0, N, T, WIDE)
        db += product(tl.trans(dproducts), c, NARROW, TYPE)
        into = ((batch * seq + first) * WHOLE + block) * N + rows * (WHOLE * N) + width
        inside = (rows < seq - first) & (width < N)
        tl.store(db_ptr + into, db.to(db_ptr.dtype.element_ty), mask=inside)
        tl.store(dc_ptr + into, dc.to(dc_ptr.dtype.element_ty), mask=inside)


def backward(
    grad: Tensor,
    grad_state: Tensor | None,
    starts: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    chunk: int = definition.CHUNK,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``mindspeed::ssd_backward``: gradients of x, dt, A, B, C, D and of the state at the start."""
    definition.check(x, dt, A, B, C, D, state, chunk)
    final, kept = definition.fake(x, dt, A, B, C, D, state, chunk)[1:]
    wanted = {"grad": (grad, x.shape), "grad_state": (grad_state, final.shape), "starts": (starts, kept.shape)}
    check_shapes("ssd_backward", wanted)
    results = definition.fake_backward(grad, grad_state, starts, x, dt, A, B, C, D, state, chunk)
    dx, ddt, dA, dB, dC, dD, dstate = results
    sizes = Sizes(x, B, C, chunk)
    if not sizes.tiles:
        dstate.zero_() if grad_state is None else dstate.copy_(grad_state)
        return *(y.zero_() for y in results[:-1]), dstate
    grad, x, B, C = (tight(y) for y in (grad, x, B, C))
    A, starts = A.contiguous(), starts.contiguous()
    states = x.new_empty((sizes.lines * sizes.tiles, sizes.p, sizes.wide), dtype=sizes.type)
    number = sizes.lines * starts.shape[1] * sizes.parts
    launch(
        ssd_spans,
        programs(x, number, WARPS, 16),
        x, dt, A, B, starts, states, number, sizes.seq, sizes.tiles, starts.shape[1],
        *x.stride()[:3], *dt.stride(), *B.stride()[:3],
        num_warps=WARPS, SPAN=sizes.span, **sizes.constants,
    )  # fmt: skip
    dstates, number = torch.empty_like(states), sizes.lines * sizes.parts
    launch(
        ssd_back,
        programs(x, number, WARPS, 16),
        grad, dt, A, C, starts if grad_state is None else grad_state.contiguous(), dstates, dstate,
        number, sizes.seq, sizes.tiles, *grad.stride()[:3], *dt.stride(), *C.stride()[:3],
        num_warps=WARPS, STATE=grad_state is not None, **sizes.constants,
    )  # fmt: skip
    strides = [n for y in (grad, x, dt, B, C) for n in y.stride()[:3]]
    number = sizes.lines * sizes.tiles
    of_tiles = [
        x.new_empty((sizes.batch, sizes.heads, sizes.tiles), dtype=torch.float32) for _ in range(1 if D is None else 2)
    ]
    num_warps = min(STEP_WARPS, warps_of(ssd_step_gradients, sizes.constants["NARROW"]))
    launch(
        ssd_step_gradients,
        programs(x, number, num_warps, 16),
        grad, x, dt, A, B, C, A if D is None else D.contiguous(), states, dstates, dx, ddt, of_tiles[0], of_tiles[-1],
        number, sizes.seq, sizes.tiles, *strides, num_warps=num_warps, SKIP=D is not None,
        **{**sizes.constants, "COLUMNS": 16},
    )  # fmt: skip
    shared = sizes.heads // sizes.groups
    blocks = -(-shared // TOGETHER)
    parts = [y if blocks == 1 else x.new_empty((*y.shape[:3], blocks, sizes.n), dtype=torch.float32) for y in (dB, dC)]
    number = sizes.batch * sizes.tiles * sizes.groups * blocks
    num_warps = warps_of(ssd_group_gradients, sizes.constants["NARROW"])
    launch(
        ssd_group_gradients,
        programs(x, number, num_warps, 16),
        grad, x, dt, A, B, C, states, dstates, *parts, number, sizes.seq, sizes.tiles, *strides,
        num_warps=num_warps, TOGETHER=min(TOGETHER, shared), **sizes.constants,
    )  # fmt: skip
    for y, part in zip((dA, dD), of_tiles):
        y.copy_(part.sum((0, 2)))
    if blocks > 1:
        for y, part in zip((dB, dC), parts):
            y.copy_(part.sum(3))
    return results
