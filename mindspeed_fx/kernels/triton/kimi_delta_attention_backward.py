"""Gradients of Kimi Delta Attention in Triton: states and N of each tile again from the states kept, a walk back
through the gradients of states, then all else for every tile at once.

Formulas as in mindspeed_fx/kernels/kimi_delta_attention_chunks.py, tiles and decays as in kimi_delta_attention.py. What
a pair of tokens adds to the gradient of c at the one it takes from it at the other: both are products of the same
rounded numbers, so that they cancel where the sum over tokens goes past both. No atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import kimi_delta_attention as definition
from mindspeed_fx.kernels.recurrence import check_shapes, rows_of_tokens
from mindspeed_fx.kernels.triton.gated_delta_rule import inverse_root
from mindspeed_fx.kernels.triton.kimi_delta_attention import (
    PARTED_WARPS,
    Sizes,
    Tiles,
    decays_from_start,
    decays_to_end,
    level_decays,
    roots_of,
    sums_where,
)
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs
from mindspeed_fx.kernels.triton.recurrence import STAGES, WARPS, numbers_of, product, put_rows, rows_of

GRADIENT_WARPS = 4
"""Of kimi_gradients: with two it spills registers."""
NORM_WARPS = 4
"""Of a kernel that only reads and writes whole rows. Not measured."""


@triton.jit
def kimi_spans(
    u_ptr, w_ptr, keys_ptr, last_ptr, starts_ptr, states_ptr, count, tiles, spans,
    D: tl.constexpr, E: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """The state before each tile [WIDE, E], and N in the place of U; a span's states come from its first."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    PARTS: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    rows, width = tl.arange(0, T)[:, None], tl.arange(0, WIDE)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, span = tl.cast(item // PARTS // spans, tl.int64), item // PARTS % spans
        at = (item % PARTS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        here = width[:, None] * E + at
        state = tl.load(
            starts_ptr + (line * spans + span) * D * E + here, mask=(width[:, None] < D) & (at < E), other=0.0
        )
        for tile in tl.range(span * SPAN, min(span * SPAN + SPAN, tiles), num_stages=STAGES):
            start = (line * tiles + tile) * T
            tl.store(states_ptr + (line * tiles + tile) * WIDE * E + here, state.to(TYPE), mask=at < E)
            wide, values = start * WIDE + rows * WIDE + width[None, :], u_ptr + start * E + rows * E + at
            u = tl.load(values, mask=at < E, other=0.0).to(tl.float32)
            u -= product(tl.load(w_ptr + wide), state, NARROW, TYPE)
            tl.store(values, u.to(TYPE), mask=at < E)
            last = tl.load(last_ptr + (line * tiles + tile) * WIDE + width)
            state = state * last[:, None] + product(tl.trans(tl.load(keys_ptr + wide)), u, NARROW, TYPE)


@triton.jit
def kimi_back(
    grad_ptr, w_ptr, queries_ptr, keys_ptr, p_ptr, last_ptr, dlast_ptr, du_ptr, dstates_ptr, dstate_ptr,
    count, seq, tiles, d0, d1, d2,
    VALUE_HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr, NARROW: tl.constexpr,
    T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of N, of the state after each tile [WIDE, E], and of the first."""
    TYPE: tl.constexpr = du_ptr.dtype.element_ty
    PARTS: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    rows, width = tl.arange(0, T)[:, None], tl.arange(0, WIDE)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        batch, head = line // VALUE_HEADS, line % VALUE_HEADS
        at = low + tl.arange(0, COLUMNS)[None, :]
        here, inside = width[:, None] * E + at, (width[:, None] < D) & (at < E)
        dstate = (width[:, None] * 0 + at * 0).to(tl.float32)
        if STATE:
            dstate = tl.load(dlast_ptr + line * D * E + here, mask=inside, other=0.0).to(tl.float32)
        for step in tl.range(0, tiles, num_stages=STAGES):
            tile = tiles - 1 - step
            first, start = tile * T, (line * tiles + tile) * T
            wide = start * WIDE + rows * WIDE + width[None, :]
            tl.store(dstates_ptr + (line * tiles + tile) * WIDE * E + here, dstate.to(TYPE), mask=at < E)
            grad = rows_of(grad_ptr + batch * d0 + head * d1, d2, first, seq, low, E, T, COLUMNS)
            p = tl.load(p_ptr + start * T + rows * T + tl.arange(0, T)[None, :])
            du = product(tl.trans(p), grad, NARROW, TYPE)
            du += product(tl.load(keys_ptr + wide), dstate, NARROW, TYPE)
            tl.store(du_ptr + start * E + rows * E + at, du.to(TYPE), mask=at < E)
            last = tl.load(last_ptr + (line * tiles + tile) * WIDE + width)
            dstate = dstate * last[:, None] + product(tl.trans(tl.load(queries_ptr + wide)), grad, NARROW, TYPE)
            dstate -= product(tl.trans(tl.load(w_ptr + wide)), du, NARROW, TYPE)
        tl.store(dstate_ptr + line * D * E + here, dstate.to(dstate_ptr.dtype.element_ty), mask=inside)


@triton.jit
def operand(x, NARROW: tl.constexpr, TYPE: tl.constexpr):
    """x in float32 as a product reads it."""
    if NARROW:
        x = x.to(TYPE).to(tl.float32)
    return x


@triton.jit
def kimi_pair_gradients(
    grad_ptr, v_ptr, beta_ptr, u_ptr, t_ptr, pairs_ptr, du_ptr, dscores_ptr, own_ptr, dsystem_ptr, dbeta_ptr,
    dv_ptr, count, seq, tiles, scale, d0, d1, d2, v0, v1, v2, b0, b1, b2,
    VALUE_HEADS: tl.constexpr, E: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of <q, k> and <k, k> below the diagonal, and the same above it [.., T]; of <q, k> on it; of v, stored
    as [batch, seq, VALUE_HEADS, E]; and that of beta without what comes by W."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, line = (item % tiles) * T, item // tiles
        batch, head = tl.cast(line // VALUE_HEADS, tl.int64), tl.cast(line % VALUE_HEADS, tl.int64)
        start, written = tl.cast(item, tl.int64) * T, (batch * seq * VALUE_HEADS + head) * E
        square = start * T + rows * T + cols
        beta = numbers_of(beta_ptr + batch * b0 + head * b1, b2, first, seq, T)
        solved = tl.trans(tl.load(t_ptr + square))
        dscores, dbeta = (rows * 0 + cols * 0).to(tl.float32), beta * 0.0
        dsystem = dscores
        for low in tl.range(0, E, COLUMNS, num_stages=STAGES):
            at = low + tl.arange(0, COLUMNS)[None, :]
            u = tl.trans(tl.load(u_ptr + start * E + rows * E + at, mask=at < E, other=0.0))
            grad = rows_of(grad_ptr + batch * d0 + head * d1, d2, first, seq, low, E, T, COLUMNS)
            dscores += product(grad, u, NARROW, TYPE)
            du = tl.load(du_ptr + start * E + rows * E + at, mask=at < E, other=0.0)
            dv = product(solved, du, NARROW, TYPE)
            dsystem -= product(dv, u, NARROW, TYPE)
            v = rows_of(v_ptr + batch * v0 + head * v1, v2, first, seq, low, E, T, COLUMNS).to(tl.float32)
            dbeta += tl.sum(dv * v, axis=1)
            put_rows(dv_ptr + written, VALUE_HEADS * E, first, seq, low, dv * beta[:, None], E, T, COLUMNS)
        dbeta += tl.sum(dsystem * tl.load(pairs_ptr + square), axis=1)
        own = tl.sum(tl.where(rows == cols, dscores, 0.0), axis=1)
        tl.store(own_ptr + start + tl.arange(0, T), own * scale)
        dscores = tl.where(rows > cols, dscores * scale, 0.0)
        tl.store(dscores_ptr + square, (dscores + tl.trans(dscores)).to(TYPE))
        dsystem = tl.where(rows > cols, dsystem * beta[:, None], 0.0)
        tl.store(dsystem_ptr + square, (dsystem + tl.trans(dsystem)).to(TYPE))
        tl.store(dbeta_ptr + start + tl.arange(0, T), dbeta)


@triton.jit
def kimi_gradients(
    grad_ptr, q_ptr, k_ptr, g_ptr, beta_ptr, u_ptr, t_ptr, last_ptr, states_ptr, dstates_ptr, du_ptr, dscores_ptr,
    own_ptr, dsystem_ptr, kept_ptr, dq_ptr, dk_ptr, dg_ptr, dbeta_ptr,
    count, seq, tiles, levels, scale, eps, d0, d1, d2, q0, q1, q2, k0, k1, k2, g0, g1, g2, b0, b1, b2,
    VALUE_HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr,
    T: tl.constexpr, WIDE: tl.constexpr, SLICE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of q and k after their norm [.., WIDE]; of g and beta, stored as [batch, seq, VALUE_HEADS, ..]."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, line = (item % tiles) * T, item // tiles
        batch, head = tl.cast(line // VALUE_HEADS, tl.int64), tl.cast(line % VALUE_HEADS, tl.int64)
        start = tl.cast(item, tl.int64) * T
        queries, keys = q_ptr + batch * q0 + head * q1, k_ptr + batch * k0 + head * k1
        square, pairs_of_scores, pairs_of_keys = rows * T + cols, dscores_ptr + start * T, dsystem_ptr + start * T
        q_root = roots_of(queries, q2, first, seq, eps, NORM, D, T, SLICE)
        k_root = roots_of(keys, k2, first, seq, eps, NORM, D, T, SLICE)
        beta = numbers_of(beta_ptr + batch * b0 + head * b1, b2, first, seq, T)
        dbeta = tl.load(kept_ptr + start + tl.arange(0, T))
        for low in tl.range(0, WIDE, SLICE, num_stages=STAGES):
            width = low + tl.arange(0, SLICE)
            dq = (rows * 0 + width[None, :] * 0).to(tl.float32)
            dk, dw, dkept = dq, dq, (width * 0).to(tl.float32)
            for left in tl.range(0, E, COLUMNS, num_stages=STAGES):
                at = left + tl.arange(0, COLUMNS)[None, :]
                here, values = width[:, None] * E + at, rows * E + at
                state = tl.load(states_ptr + start // T * WIDE * E + here, mask=at < E, other=0.0)
                grad = rows_of(grad_ptr + batch * d0 + head * d1, d2, first, seq, left, E, T, COLUMNS)
                dq += product(grad, tl.trans(state), NARROW, TYPE)
                du = tl.load(du_ptr + start * E + values, mask=at < E, other=0.0)
                dw -= product(du, tl.trans(state), NARROW, TYPE)
                dstate = tl.load(dstates_ptr + start // T * WIDE * E + here, mask=at < E, other=0.0)
                u = tl.load(u_ptr + start * E + values, mask=at < E, other=0.0)
                dk += product(u, tl.trans(dstate), NARROW, TYPE)
                dkept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1)
            g = rows_of(g_ptr + batch * g0 + head * g1, g2, first, seq, low, D, T, SLICE).to(tl.float32)
            k = rows_of(keys, k2, first, seq, low, D, T, SLICE).to(tl.float32) * k_root
            q = rows_of(queries, q2, first, seq, low, D, T, SLICE).to(tl.float32) * q_root
            grow = decays_from_start(g, NARROW, T)
            dq *= grow * scale
            dk *= decays_to_end(g, NARROW, T)
            last = tl.load(last_ptr + tl.cast(item, tl.int64) * WIDE + width)
            whole = tl.sum(dk * k, axis=0) + dkept * last
            dw = product(tl.trans(tl.load(t_ptr + start * T + square)), dw, NARROW, TYPE) * grow  # of beta k
            dbeta += tl.sum(dw * k, axis=1)
            dw *= beta[:, None]
            dc = q * dq + k * (dw - dk) + tl.where(rows == T - 1, whole[None, :], 0.0)
            own = tl.load(own_ptr + start + tl.arange(0, T))[:, None]
            dk += dw + own * q
            dq += own * k
            for i in range(0, levels):
                decay, late = level_decays(g, i, NARROW, T), (rows >> i) & 1 == 1
                pairs = (rows >> (i + 1) == cols >> (i + 1)) & (rows >> i != cols >> i)
                x = operand(tl.where(late, q, k) * decay, NARROW, TYPE)
                dx = product(tl.load(pairs_of_scores + square, mask=pairs, other=0.0), x, NARROW, TYPE)
                y = operand(k * decay, NARROW, TYPE)
                dy = product(tl.load(pairs_of_keys + square, mask=pairs, other=0.0), y, NARROW, TYPE)
                dc += tl.where(late, 1.0, -1.0) * (dx * x + dy * y)
                dq += tl.where(late, dx * decay, 0.0)
                dk += tl.where(late, dy, dx + dy) * decay
            wide = rows * WIDE + width[None, :]
            tl.store(dq_ptr + start * WIDE + wide, dq)
            tl.store(dk_ptr + start * WIDE + wide, dk)
            dg = sums_where(rows <= cols, dc, NARROW)
            put_rows(dg_ptr + (batch * seq * VALUE_HEADS + head) * D, VALUE_HEADS * D, first, seq, low, dg, D, T, SLICE)
        at = dbeta_ptr + (batch * seq + first) * VALUE_HEADS + head + tl.arange(0, T) * VALUE_HEADS
        tl.store(at, dbeta.to(dbeta_ptr.dtype.element_ty), mask=tl.arange(0, T) < seq - first)


@triton.jit
def kimi_norm_gradients(
    x_ptr, wide_ptr, dx_ptr, count, seq, tiles, eps, x0, x1, x2,
    VALUE_HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Gradient of queries or keys, stored as [batch, seq, VALUE_HEADS, D], from that after their norm [.., WIDE]."""
    rows, width = tl.arange(0, T)[:, None], tl.arange(0, WIDE)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, line = (item % tiles) * T, item // tiles
        batch, head = tl.cast(line // VALUE_HEADS, tl.int64), tl.cast(line % VALUE_HEADS, tl.int64)
        dx = tl.load(wide_ptr + tl.cast(item, tl.int64) * T * WIDE + rows * WIDE + width)
        if NORM:
            x = rows_of(x_ptr + batch * x0 + head * x1, x2, first, seq, 0, D, T, WIDE).to(tl.float32)
            root = inverse_root(x, eps, NORM)
            x *= root
            dx = (dx - x * tl.sum(dx * x, axis=1)[:, None]) * root
        put_rows(dx_ptr + (batch * seq * VALUE_HEADS + head) * D, VALUE_HEADS * D, first, seq, 0, dx, D, T, WIDE)


def backward(
    grad: Tensor,
    grad_state: Tensor | None,
    starts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``mindspeed::kimi_delta_attention_backward``: gradients of q, k, v, g, beta and of the state at the start."""
    definition.check(q, k, v, g, beta, state)
    final, states = definition.fake(q, k, v, g, beta, state, scale, norm_eps)[1:]
    wanted = {"grad": (grad, v.shape), "grad_state": (grad_state, final.shape), "starts": (starts, states.shape)}
    check_shapes("kimi_delta_attention_backward", wanted)
    results = definition.fake_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps)
    dq, dk, dv, dg, dbeta, dstate = results
    q, k, v, g = map(rows_of_tokens, (q, k, v, g))
    sizes = Sizes(q, k, v, norm_eps)
    if not sizes.tiles:
        dstate.zero_() if grad_state is None else dstate.copy_(grad_state)
        return results
    grad, starts = grad if grad.stride(-1) == 1 else grad.contiguous(), starts.contiguous()
    x = Tiles(sizes, q, k, v, g, beta, scale)
    count, number = sizes.lines * sizes.tiles, sizes.lines * sizes.parts
    states = v.new_empty((count, sizes.wide, v.shape[3]), dtype=sizes.type)
    tile = {**sizes.constants, **sizes.values}
    launch(
        kimi_spans,
        programs(v, number * starts.shape[2], WARPS, 16),
        x.u, x.w, x.keys, x.last, starts, states, number * starts.shape[2], sizes.tiles, starts.shape[2],
        num_warps=WARPS, SPAN=sizes.span, **only(tile, "D", "E", "NARROW", "T", "WIDE", "COLUMNS"),
    )  # fmt: skip
    du, dstates = torch.empty_like(x.u), torch.empty_like(states)
    launch(
        kimi_back,
        programs(v, number, WARPS, 16),
        grad, x.w, x.queries, x.keys, x.p, x.last, starts if grad_state is None else grad_state.contiguous(), du,
        dstates, dstate, number, sizes.seq, sizes.tiles, *grad.stride()[:3],
        num_warps=WARPS, STATE=grad_state is not None, **tile,
    )  # fmt: skip
    dscores, dsystem = torch.empty_like(x.p), torch.empty_like(x.p)
    own, kept = (x.pairs.new_empty(x.pairs.shape[:2]) for _ in range(2))
    launch(
        kimi_pair_gradients,
        programs(v, count, PARTED_WARPS, 16),
        grad, v, beta, x.u, x.t, x.pairs, du, dscores, own, dsystem, kept, dv, count, sizes.seq, sizes.tiles,
        scale, *grad.stride()[:3], *v.stride()[:3], *beta.stride()[:3],
        num_warps=PARTED_WARPS, **only(tile, "VALUE_HEADS", "E", "NARROW", "T", "COLUMNS"),
    )  # fmt: skip
    dqueries, dkeys = (torch.empty_like(x.w, dtype=torch.float32) for _ in range(2))
    strides = [n for y in (grad, q, k, g, beta) for n in y.stride()[:3]]
    launch(
        kimi_gradients,
        programs(v, count, GRADIENT_WARPS, 16),
        grad, q, k, g, beta, x.u, x.t, x.last, states, dstates, du, dscores, own, dsystem, kept, dqueries,
        dkeys, dg, dbeta, count, sizes.seq, sizes.tiles, sizes.levels, scale, sizes.eps, *strides,
        num_warps=GRADIENT_WARPS, **{**tile, "COLUMNS": half_of(v.shape[3])}, **sizes.gates,
    )  # fmt: skip
    for y, wide, dy in ((q, dqueries, dq), (k, dkeys, dk)):
        launch(
            kimi_norm_gradients,
            programs(v, count, NORM_WARPS, 32),
            y, wide, dy, count, sizes.seq, sizes.tiles, sizes.eps, *y.stride()[:3],
            num_warps=NORM_WARPS, NORM=sizes.gates["NORM"], **only(tile, "VALUE_HEADS", "D", "T", "WIDE"),
        )  # fmt: skip
    return results


def half_of(width: int) -> int:
    """Columns of values that kimi_gradients reads at a time: a loop over all of them at once is no loop to ptxas, which
    then spills registers."""
    return min(64, max(16, power_of_two(width) // 2))


def only(constants: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: constants[name] for name in names}
