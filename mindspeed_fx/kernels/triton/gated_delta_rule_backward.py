"""Gradients of the gated delta rule in Triton: states and N of each tile again from the states kept, a walk back
through the gradients of states, then all else for every tile at once.

Formulas as in mindspeed_fx/kernels/gated_delta_rule_chunks.py, tiles as in gated_delta_rule.py. Heads that share a key
leave a gradient of it each, summed after: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import gated_delta_rule as definition
from mindspeed_fx.kernels.recurrence import check_shapes, rows_of_tokens
from mindspeed_fx.kernels.triton.gated_delta_rule import Sizes, inverse_root, unit_rows
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs
from mindspeed_fx.kernels.triton.recurrence import (
    STAGES,
    WARPS,
    decays,
    last_of,
    numbers_of,
    product,
    rows_of,
    sums_after,
    warps_of,
)


@triton.jit
def delta_rule_spans(
    k_ptr, u_ptr, w_ptr, c_ptr, starts_ptr, states_ptr, count, seq, tiles, spans, eps, k0, k1, k2,
    VALUE_HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
    NARROW: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
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
        keys = k_ptr + line // VALUE_HEADS * k0 + line % VALUE_HEADS // SHARED * k1
        for tile in tl.range(span * SPAN, min(span * SPAN + SPAN, tiles), num_stages=STAGES):
            start = (line * tiles + tile) * T
            tl.store(states_ptr + (line * tiles + tile) * WIDE * E + here, state.to(TYPE), mask=at < E)
            c = tl.load(c_ptr + start + tl.arange(0, T))
            last = last_of(c, T)
            w = tl.load(w_ptr + start * WIDE + rows * WIDE + width[None, :])
            values = u_ptr + start * E + rows * E + at
            u = tl.load(values, mask=at < E, other=0.0).to(tl.float32) - product(w, state, NARROW, TYPE)
            tl.store(values, u.to(TYPE), mask=at < E)
            k = unit_rows(keys, k2, tile * T, seq, eps, NORM, D, T, WIDE)
            k *= tl.exp(last - c)[:, None]
            state = state * tl.exp(last) + product(tl.trans(k), u, NARROW, TYPE)


@triton.jit
def delta_rule_back(
    grad_ptr, q_ptr, k_ptr, w_ptr, p_ptr, c_ptr, last_ptr, du_ptr, dstates_ptr, dstate_ptr, count, seq, tiles, scale,
    eps, d0, d1, d2, q0, q1, q2, k0, k1, k2,
    VALUE_HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr,
    NORM: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
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
            dstate = tl.load(last_ptr + line * D * E + here, mask=inside, other=0.0).to(tl.float32)
        for step in tl.range(0, tiles, num_stages=STAGES):
            tile = tiles - 1 - step
            first, start = tile * T, (line * tiles + tile) * T
            tl.store(dstates_ptr + (line * tiles + tile) * WIDE * E + here, dstate.to(TYPE), mask=at < E)
            c = tl.load(c_ptr + start + tl.arange(0, T))
            last = last_of(c, T)
            grad = rows_of(grad_ptr + batch * d0 + head * d1, d2, first, seq, low, E, T, COLUMNS)
            p = tl.load(p_ptr + start * T + rows * T + tl.arange(0, T)[None, :])
            k = unit_rows(k_ptr + batch * k0 + head // SHARED * k1, k2, first, seq, eps, NORM, D, T, WIDE)
            k *= tl.exp(last - c)[:, None]
            du = product(tl.trans(p), grad, NARROW, TYPE) + product(k, dstate, NARROW, TYPE)
            tl.store(du_ptr + start * E + rows * E + at, du.to(TYPE), mask=at < E)
            q = unit_rows(q_ptr + batch * q0 + head // SHARED * q1, q2, first, seq, eps, NORM, D, T, WIDE)
            q *= (scale * tl.exp(c))[:, None]
            w = tl.load(w_ptr + start * WIDE + rows * WIDE + width[None, :])
            dstate = dstate * tl.exp(last) + product(tl.trans(q), grad, NARROW, TYPE)
            dstate -= product(tl.trans(w), du, NARROW, TYPE)
        tl.store(dstate_ptr + line * D * E + here, dstate.to(dstate_ptr.dtype.element_ty), mask=inside)


@triton.jit
def delta_rule_query_gradients(
    grad_ptr, q_ptr, k_ptr, u_ptr, p_ptr, c_ptr, states_ptr, dstates_ptr, dq_ptr, dkeys_ptr, dc_ptr,
    count, seq, tiles, scale, eps, d0, d1, d2, q0, q1, q2, k0, k1, k2,
    VALUE_HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr,
    NARROW: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradient of q, stored as [batch, seq, VALUE_HEADS, D]; what scores and the next state add to that of k [.., WIDE]
    before its norm, and to those of c."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    rows, cols, width = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, WIDE)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, line = (item % tiles) * T, item // tiles
        batch, head = tl.cast(line // VALUE_HEADS, tl.int64), tl.cast(line % VALUE_HEADS, tl.int64)
        start = tl.cast(item, tl.int64) * T
        square = start * T + rows * T + cols
        dscores = (rows * 0 + cols * 0).to(tl.float32)
        dq = (rows * 0 + width[None, :] * 0).to(tl.float32)
        dk, drest = dq, 0.0
        for low in tl.range(0, E, COLUMNS, num_stages=STAGES):
            at = low + tl.arange(0, COLUMNS)[None, :]
            here = start // T * WIDE * E + width[:, None] * E + at
            grad = rows_of(grad_ptr + batch * d0 + head * d1, d2, first, seq, low, E, T, COLUMNS)
            u = tl.load(u_ptr + start * E + rows * E + at, mask=at < E, other=0.0)
            dscores += product(grad, tl.trans(u), NARROW, TYPE)
            state = tl.load(states_ptr + here, mask=at < E, other=0.0)
            dq += product(grad, tl.trans(state), NARROW, TYPE)
            dstate = tl.load(dstates_ptr + here, mask=at < E, other=0.0)
            dk += product(u, tl.trans(dstate), NARROW, TYPE)
            drest += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), axis=1), axis=0)
        c = tl.load(c_ptr + start + tl.arange(0, T))
        last = last_of(c, T)
        pairs = dscores * tl.load(p_ptr + square).to(tl.float32)
        dc = tl.sum(pairs - tl.trans(pairs), axis=1)
        dscores *= decays(c, T) * scale
        dq *= scale * tl.exp(c)[:, None]
        q = rows_of(q_ptr + batch * q0 + head // SHARED * q1, q2, first, seq, 0, D, T, WIDE).to(tl.float32)
        root = inverse_root(q, eps, NORM)
        q *= root
        dc += tl.sum(dq * q, axis=1)
        dscored = product(tl.trans(dscores), q, NARROW, TYPE)
        k = unit_rows(k_ptr + batch * k0 + head // SHARED * k1, k2, first, seq, eps, NORM, D, T, WIDE)
        dq += product(dscores, k, NARROW, TYPE)
        if NORM:
            dq = (dq - q * tl.sum(dq * q, axis=1)[:, None]) * root
        at = ((batch * seq + first) * VALUE_HEADS + head) * D + rows * (VALUE_HEADS * D) + width[None, :]
        tl.store(dq_ptr + at, dq.to(dq_ptr.dtype.element_ty), mask=(rows < seq - first) & (width[None, :] < D))
        dk *= tl.exp(last - c)[:, None]
        kept = tl.sum(dk * k, axis=1)
        whole = tl.sum(kept, axis=0) + drest * tl.exp(last)
        tl.store(dc_ptr + start + tl.arange(0, T), dc - kept + tl.where(tl.arange(0, T) == T - 1, whole, 0.0))
        tl.store(dkeys_ptr + start * WIDE + rows * WIDE + width[None, :], (dk + dscored).to(TYPE))


@triton.jit
def delta_rule_key_gradients(
    k_ptr, v_ptr, beta_ptr, u_ptr, t_ptr, c_ptr, states_ptr, du_ptr, dkeys_ptr, dc_ptr, dk_ptr, dv_ptr, dg_ptr,
    dbeta_ptr, count, seq, tiles, eps, k0, k1, k2, v0, v1, v2, b0, b1, b2,
    VALUE_HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Gradients of k, v, g and beta, stored as [batch, seq, VALUE_HEADS, ...]."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    rows, cols, width = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, WIDE)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, line = (item % tiles) * T, item // tiles
        batch, head = tl.cast(line // VALUE_HEADS, tl.int64), tl.cast(line % VALUE_HEADS, tl.int64)
        start, written = tl.cast(item, tl.int64) * T, (batch * seq + first) * VALUE_HEADS + head
        tokens = first + tl.arange(0, T)
        beta = numbers_of(beta_ptr + batch * b0 + head * b1, b2, first, seq, T)
        solved = tl.trans(tl.load(t_ptr + start * T + rows * T + cols))
        dsystem = (rows * 0 + cols * 0).to(tl.float32)
        dw, dbeta = (rows * 0 + width[None, :] * 0).to(tl.float32), beta * 0.0
        for low in tl.range(0, E, COLUMNS, num_stages=STAGES):
            at = low + tl.arange(0, COLUMNS)[None, :]
            here = start // T * WIDE * E + width[:, None] * E + at
            du = tl.load(du_ptr + start * E + rows * E + at, mask=at < E, other=0.0)
            state = tl.load(states_ptr + here, mask=at < E, other=0.0)
            dw -= product(du, tl.trans(state), NARROW, TYPE)
            dv = product(solved, du, NARROW, TYPE)
            u = tl.load(u_ptr + start * E + rows * E + at, mask=at < E, other=0.0)
            dsystem -= product(dv, tl.trans(u), NARROW, TYPE)
            v = rows_of(v_ptr + batch * v0 + head * v1, v2, first, seq, low, E, T, COLUMNS).to(tl.float32)
            dbeta += tl.sum(dv * v, axis=1)
            dv_at = dv_ptr + written * E + rows * (VALUE_HEADS * E) + at
            tl.store(dv_at, (dv * beta[:, None]).to(dv_ptr.dtype.element_ty), mask=(rows < seq - first) & (at < E))
        c = tl.load(c_ptr + start + tl.arange(0, T))
        k = rows_of(k_ptr + batch * k0 + head // SHARED * k1, k2, first, seq, 0, D, T, WIDE).to(tl.float32)
        root = inverse_root(k, eps, NORM)
        k *= root
        dw = product(solved, dw, NARROW, TYPE) * tl.exp(c)[:, None]  # of beta k
        by_key = tl.sum(dw * k, axis=1)
        dk = tl.load(dkeys_ptr + start * WIDE + rows * WIDE + width[None, :]).to(tl.float32) + dw * beta[:, None]
        dsystem = tl.where(rows > cols, dsystem, 0.0) * decays(c, T)
        pairs = dsystem * product(k, tl.trans(k), NARROW, TYPE)
        dsystem *= beta[:, None]
        dk += product(dsystem + tl.trans(dsystem), k, NARROW, TYPE)
        dbeta += by_key + tl.sum(pairs, axis=1)
        lines = written + tl.arange(0, T) * VALUE_HEADS
        tl.store(dbeta_ptr + lines, dbeta.to(dbeta_ptr.dtype.element_ty), mask=tokens < seq)
        if GATED:
            pairs *= beta[:, None]
            dc = tl.load(dc_ptr + start + tl.arange(0, T)) + by_key * beta
            dc += tl.sum(pairs - tl.trans(pairs), axis=1)
            dg = sums_after(dc, T)
            tl.store(dg_ptr + lines, dg.to(dg_ptr.dtype.element_ty), mask=tokens < seq)
        if NORM:
            dk = (dk - k * tl.sum(dk * k, axis=1)[:, None]) * root
        at = written * D + rows * (VALUE_HEADS * D) + width[None, :]
        tl.store(dk_ptr + at, dk.to(dk_ptr.dtype.element_ty), mask=(rows < seq - first) & (width[None, :] < D))


def backward(
    grad: Tensor,
    grad_state: Tensor | None,
    starts: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
    chunk: int = definition.CHUNK,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``mindspeed::gated_delta_rule_backward``: gradients of q, k, v, g, beta and of the state at the start."""
    definition.check(q, k, v, g, beta, state, chunk)
    final, kept = definition.fake(q, k, v, g, beta, state, scale, norm_eps, chunk)[1:]
    wanted = {"grad": (grad, v.shape), "grad_state": (grad_state, final.shape), "starts": (starts, kept.shape)}
    check_shapes("gated_delta_rule_backward", wanted)
    results = definition.fake_backward(grad, grad_state, starts, q, k, v, g, beta, state, scale, norm_eps, chunk)
    dq, dk, dv, dg, dbeta, dstate = results
    q, k, v = map(rows_of_tokens, (q, k, v))
    sizes = Sizes(q, k, v, g, beta, norm_eps, chunk)
    if not sizes.tiles:
        dstate.zero_() if grad_state is None else dstate.copy_(grad_state)
        return results
    grad, starts = grad if grad.stride(-1) == 1 else grad.contiguous(), starts.contiguous()
    u, w, p, t, c = sizes.chunks(q, k, v, g, beta, scale)
    parts, count = -(-v.shape[3] // sizes.columns), sizes.lines * sizes.tiles
    states = v.new_empty((count, sizes.wide, v.shape[3]), dtype=sizes.type)
    tile = {**sizes.constants, "T": sizes.tokens, "WIDE": sizes.wide, "COLUMNS": sizes.columns}
    number = sizes.lines * starts.shape[2] * parts
    launch(
        delta_rule_spans,
        programs(v, number, WARPS, 16),
        k, u, w, c, starts, states, number, sizes.seq, sizes.tiles, starts.shape[2], sizes.eps, *k.stride()[:3],
        num_warps=WARPS, SPAN=sizes.span, **tile,
    )  # fmt: skip
    du, dstates = torch.empty_like(u), torch.empty_like(states)
    launch(
        delta_rule_back,
        programs(v, sizes.lines * parts, WARPS, 16),
        grad, q, k, w, p, c, starts if grad_state is None else grad_state.contiguous(), du, dstates, dstate,
        sizes.lines * parts, sizes.seq, sizes.tiles, scale, sizes.eps,
        *grad.stride()[:3], *q.stride()[:3], *k.stride()[:3],
        num_warps=WARPS, STATE=grad_state is not None, **tile,
    )  # fmt: skip
    is_shared = v.shape[1] != k.shape[1]
    of_keys = [
        v.new_empty((v.shape[0], sizes.seq, v.shape[1], k.shape[3]), dtype=torch.float32) if is_shared else x
        for x in (dq, dk)
    ]
    dkeys, dc = torch.empty_like(w), torch.empty_like(c)
    num_warps = warps_of(delta_rule_query_gradients, sizes.constants["NARROW"])
    launch(
        delta_rule_query_gradients,
        programs(v, count, num_warps, 16),
        grad, q, k, u, p, c, states, dstates, of_keys[0], dkeys, dc, count, sizes.seq, sizes.tiles, scale, sizes.eps,
        *grad.stride()[:3], *q.stride()[:3], *k.stride()[:3],
        num_warps=num_warps, **{**tile, "COLUMNS": min(2 * sizes.columns, max(16, power_of_two(v.shape[3])))},
    )  # fmt: skip
    num_warps = warps_of(delta_rule_key_gradients, sizes.constants["NARROW"])
    launch(
        delta_rule_key_gradients,
        programs(v, count, num_warps, 16),
        k, v, beta, u, t, c, states, du, dkeys, dc, of_keys[1], dv, dbeta if g is None else dg, dbeta,
        count, sizes.seq, sizes.tiles, sizes.eps, *k.stride()[:3], *v.stride()[:3], *beta.stride()[:3],
        num_warps=num_warps, GATED=g is not None, **tile,
    )  # fmt: skip
    if is_shared:
        for x, wide in zip((dq, dk), of_keys):
            x.copy_(wide.unflatten(2, (x.shape[1], -1)).sum(3).transpose(1, 2))
    return results
