"""The gated delta rule in Triton: what stands inside chunks for all of them at once, then a walk through the states.

One program makes the triangular system of a tile of tokens, its inverse T and from it U, W and P; one walks through the
tiles of a head with some columns of its state. Everything is a product of tiles; the system is inverted by halves: the
inverse of a block is that of its two diagonal blocks, less their product with what stands below. Letters and formulas
as at the top of mindspeed_fx/kernels/gated_delta_rule.py; no atomics. What one kernel leaves to another has the type of
the arguments, in which products are taken; sums and states are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import gated_delta_rule as definition
from mindspeed_fx.kernels.gated_delta_rule_chunks import SPAN
from mindspeed_fx.kernels.recurrence import rows_of_tokens
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs
from mindspeed_fx.kernels.triton.recurrence import (
    EXACT,
    STAGES,
    WARPS,
    decays,
    is_narrow,
    last_of,
    numbers_of,
    product,
    rows_of,
    sums_before,
    warps_of,
)

TOKENS = 32
"""Most tokens of a tile."""
COLUMNS = 32
"""Columns of a state that a program walks with, and of values that one reads at a time."""


@triton.jit
def inverse_root(x, eps, NORM: tl.constexpr):
    """1 / sqrt(sum(x^2) + eps) of rows of x [T, width], as [T, 1]; ones without NORM."""
    total = tl.sum(x * x, axis=1)[:, None]
    if NORM:
        out = 1.0 / tl.sqrt(total + eps)
    else:
        out = total * 0.0 + 1.0
    return out


@triton.jit
def unit_rows(
    base, stride, first, seq, eps, NORM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Queries or keys of a tile [T, WIDE] in float32, normalized with NORM."""
    x = rows_of(base, stride, first, seq, 0, D, T, WIDE).to(tl.float32)
    return x * inverse_root(x, eps, NORM)


@triton.jit
def inverted(system, T: tl.constexpr, LEVELS: tl.constexpr, NARROW: tl.constexpr):
    """(I + system)^-1 of a strictly lower triangular system [T, T], T = 2^LEVELS."""
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    out = tl.where(rows == cols, 1.0, 0.0) - tl.where((rows >> 1 == cols >> 1) & (rows > cols), system, 0.0)
    for i in range(1, LEVELS):
        below = (rows >> (i + 1) == cols >> (i + 1)) & (rows >> i != cols >> i)
        part = tl.where(below, system, 0.0)
        if NARROW:
            out -= tl.dot(out, tl.dot(part, out))
        else:
            out -= tl.dot(out, tl.dot(part, out, input_precision=EXACT), input_precision=EXACT)
    return out


@triton.jit
def delta_rule_chunks(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, u_ptr, w_ptr, p_ptr, t_ptr, c_ptr, count, seq, tiles, scale, eps,
    q0, q1, q2, k0, k1, k2, v0, v1, v2, g0, g1, g2, b0, b1, b2,
    VALUE_HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, GATED: tl.constexpr,
    NORM: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """U [.., E], W [.., WIDE], P and T [.., T], and c of each tile; strides are those of batch, heads and sequence."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, head = (item % tiles) * T, (item // tiles) % VALUE_HEADS
        batch, head = tl.cast(item // tiles // VALUE_HEADS, tl.int64), tl.cast(head, tl.int64)
        k = unit_rows(k_ptr + batch * k0 + head // SHARED * k1, k2, first, seq, eps, NORM, D, T, WIDE)
        beta = numbers_of(beta_ptr + batch * b0 + head * b1, b2, first, seq, T)
        if GATED:
            g = numbers_of(g_ptr + batch * g0 + head * g1, g2, first, seq, T)
            c = sums_before(g, T)
        else:
            c = beta * 0.0
        decay = decays(c, T)
        start = tl.cast(item, tl.int64) * T
        tl.store(c_ptr + start + tl.arange(0, T), c)
        q = unit_rows(q_ptr + batch * q0 + head // SHARED * q1, q2, first, seq, eps, NORM, D, T, WIDE)
        q *= scale
        square = start * T + rows * T + cols
        tl.store(p_ptr + square, (product(q, tl.trans(k), NARROW, TYPE) * decay).to(TYPE))
        system = tl.where(rows > cols, product(k, tl.trans(k), NARROW, TYPE) * decay * beta[:, None], 0.0)
        solved = inverted(system, T, LEVELS, NARROW).to(TYPE)
        tl.store(t_ptr + square, solved)
        k = unit_rows(k_ptr + batch * k0 + head // SHARED * k1, k2, first, seq, eps, NORM, D, T, WIDE)
        wide = start * WIDE + rows * WIDE + tl.arange(0, WIDE)[None, :]
        tl.store(w_ptr + wide, product(solved, k * (beta * tl.exp(c))[:, None], NARROW, TYPE).to(TYPE))
        for low in tl.range(0, E, COLUMNS, num_stages=STAGES):
            v = rows_of(v_ptr + batch * v0 + head * v1, v2, first, seq, low, E, T, COLUMNS).to(tl.float32)
            u = product(solved, v * beta[:, None], NARROW, TYPE)
            at = low + tl.arange(0, COLUMNS)[None, :]
            tl.store(u_ptr + start * E + rows * E + at, u.to(TYPE), mask=at < E)


@triton.jit
def delta_rule_states(
    q_ptr, k_ptr, u_ptr, w_ptr, p_ptr, c_ptr, state_ptr, out_ptr, final_ptr, starts_ptr, count, seq, tiles, spans,
    scale, eps, q0, q1, q2, k0, k1, k2, o0, o1, o2,
    VALUE_HEADS: tl.constexpr, SHARED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr,
    NORM: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """The result, the states before every SPAN tiles and the last one, for COLUMNS of a head's state at a time."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    PARTS: tl.constexpr = (E + COLUMNS - 1) // COLUMNS
    rows, width = tl.arange(0, T)[:, None], tl.arange(0, WIDE)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        batch, head = line // VALUE_HEADS, line % VALUE_HEADS
        at = low + tl.arange(0, COLUMNS)[None, :]
        here, inside = width[:, None] * E + at, (width[:, None] < D) & (at < E)
        state = (width[:, None] * 0 + at * 0).to(tl.float32)
        if STATE:
            state = tl.load(state_ptr + line * D * E + here, mask=inside, other=0.0).to(tl.float32)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            if tile % SPAN == 0:
                tl.store(starts_ptr + (line * spans + tile // SPAN) * D * E + here, state, mask=inside)
            first, start = tile * T, (line * tiles + tile) * T
            c = tl.load(c_ptr + start + tl.arange(0, T))
            last = last_of(c, T)
            w = tl.load(w_ptr + start * WIDE + rows * WIDE + width[None, :])
            u = tl.load(u_ptr + start * E + rows * E + at, mask=at < E, other=0.0).to(tl.float32)
            u -= product(w, state, NARROW, TYPE)
            q = unit_rows(q_ptr + batch * q0 + head // SHARED * q1, q2, first, seq, eps, NORM, D, T, WIDE)
            q *= (scale * tl.exp(c))[:, None]
            out = product(q, state, NARROW, TYPE)
            p = tl.load(p_ptr + start * T + rows * T + tl.arange(0, T)[None, :])
            out += product(p, u, NARROW, TYPE)
            out_at = out_ptr + batch * o0 + head * o1 + tl.cast(first, tl.int64) * o2 + rows * o2 + at
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(rows < seq - first) & (at < E))
            k = unit_rows(k_ptr + batch * k0 + head // SHARED * k1, k2, first, seq, eps, NORM, D, T, WIDE)
            k *= tl.exp(last - c)[:, None]
            state = state * tl.exp(last) + product(tl.trans(k), u, NARROW, TYPE)
        tl.store(final_ptr + line * D * E + here, state, mask=inside)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
    chunk: int = definition.CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::gated_delta_rule``."""
    definition.check(q, k, v, g, beta, state, chunk)
    out, final, starts = definition.fake(q, k, v, g, beta, state, scale, norm_eps, chunk)
    q, k, v = map(rows_of_tokens, (q, k, v))
    sizes = Sizes(q, k, v, g, beta, norm_eps, chunk)
    if not sizes.tiles:
        final.zero_() if state is None else final.copy_(state)
        return out, final, starts
    u, w, p, _, c = sizes.chunks(q, k, v, g, beta, scale)
    parts = -(-v.shape[3] // sizes.columns)
    launch(
        delta_rule_states,
        programs(v, sizes.lines * parts, WARPS, 16),
        q, k, u, w, p, c, starts if state is None else state.contiguous(), out, final, starts,
        sizes.lines * parts, sizes.seq, sizes.tiles, starts.shape[2], scale, sizes.eps,
        *q.stride()[:3], *k.stride()[:3], *out.stride()[:3],
        num_warps=WARPS,
        STATE=state is not None, SPAN=sizes.span, **sizes.constants, T=sizes.tokens, WIDE=sizes.wide,
        COLUMNS=sizes.columns,
    )  # fmt: skip
    return out, final, starts


class Sizes:
    """Tiles of a call, and what all kernels are given."""

    def __init__(self, q, k, v, g, beta, norm_eps, chunk):
        self.tokens = tile_tokens(chunk)
        self.seq, self.lines = v.shape[2], v.shape[0] * v.shape[1]
        self.tiles, self.span = -(-self.seq // self.tokens), SPAN * chunk // self.tokens
        self.eps, self.wide = norm_eps or 0.0, max(16, power_of_two(k.shape[3]))
        self.columns = min(COLUMNS, max(16, power_of_two(v.shape[3])))
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        self.type = dtype
        self.constants: dict[str, Any] = {
            "VALUE_HEADS": v.shape[1], "SHARED": v.shape[1] // k.shape[1], "D": k.shape[3], "E": v.shape[3],
            "NORM": norm_eps is not None, "NARROW": is_narrow(dtype, v),
        }  # fmt: skip

    def chunks(self, q, k, v, g, beta, scale) -> list[Tensor]:
        """U, W, P, T and c of all tiles."""
        count = self.lines * self.tiles
        widths = (v.shape[3], self.wide, self.tokens, self.tokens)
        results = [v.new_empty((count, self.tokens, n), dtype=self.type) for n in widths]
        results.append(v.new_empty((count, self.tokens), dtype=torch.float32))
        strides = [n for x in (q, k, v, beta if g is None else g, beta) for n in x.stride()[:3]]
        num_warps = warps_of(delta_rule_chunks, self.constants["NARROW"])
        launch(
            delta_rule_chunks,
            programs(v, count, num_warps, 16),
            q, k, v, beta if g is None else g, beta, *results, count, self.seq, self.tiles, scale, self.eps, *strides,
            num_warps=num_warps,
            GATED=g is not None, **self.constants, T=self.tokens, LEVELS=self.tokens.bit_length() - 1, WIDE=self.wide,
            COLUMNS=self.columns,
        )  # fmt: skip
        return results


def tile_tokens(chunk: int) -> int:
    """Tokens of a tile: the largest power of two up to :data:`TOKENS` that divides those between kept states."""
    span = SPAN * chunk
    return min(TOKENS, span & -span)
