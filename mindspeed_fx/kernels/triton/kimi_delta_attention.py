"""Kimi Delta Attention in Triton: what stands inside chunks for all of them at once, then a walk through the states.

Programs, tiles and types as in gated_delta_rule.py; letters and formulas as at the top of
mindspeed_fx/kernels/kimi_delta_attention.py. Decays belong to channels, so what queries and keys have of them is
multiplied in once, before the walk. A decay between tokens is e to the sum of the gates between them, never a
difference of sums from the start of the tile: it is a product of a matrix of zeros and ones with the gates, in full
float32, which no strong gate elsewhere makes inexact, and rows chosen by a level need no gathering.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import kimi_delta_attention as definition
from mindspeed_fx.kernels.gated_delta_rule_chunks import SPAN
from mindspeed_fx.kernels.recurrence import rows_of_tokens
from mindspeed_fx.kernels.triton.gated_delta_rule import COLUMNS, inverted, tile_tokens
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs
from mindspeed_fx.kernels.triton.recurrence import (
    ASCEND,
    EXACT,
    STAGES,
    WARPS,
    is_narrow,
    numbers_of,
    product,
    rows_of,
)

SLICE = 16
"""Channels of queries and keys whose decays are on chip at a time: of twice as many registers spill."""
PARTED_WARPS = 2
"""Of kernels whose tiles do not wait for each other: their operands are a slice wide. Not measured."""


@triton.jit
def sums_where(chosen, x, NARROW: tl.constexpr):
    """The sums of the rows of x [T, width] that ``chosen`` [T, T] has for each row, in full float32. Zeros and ones are
    numbers of any type: with NARROW tensor cores take x as the sum of three of bfloat16."""
    if NARROW and not ASCEND:
        ones = tl.where(chosen, 1.0, 0.0).to(tl.bfloat16)
        high = x.to(tl.bfloat16)
        x -= high.to(tl.float32)
        middle = x.to(tl.bfloat16)
        low = (x - middle.to(tl.float32)).to(tl.bfloat16)
        out = tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, low)))
    else:
        out = tl.dot(tl.where(chosen, 1.0, 0.0), x, input_precision=EXACT)
    return out


@triton.jit
def decays_from_start(g, NARROW: tl.constexpr, T: tl.constexpr):
    """e^c of gates g [T, width]."""
    return tl.exp(sums_where(tl.arange(0, T)[:, None] >= tl.arange(0, T)[None, :], g, NARROW))


@triton.jit
def decays_to_end(g, NARROW: tl.constexpr, T: tl.constexpr):
    """e^(c_C - c)."""
    return tl.exp(sums_where(tl.arange(0, T)[:, None] < tl.arange(0, T)[None, :], g, NARROW))


@triton.jit
def level_decays(g, i, NARROW: tl.constexpr, T: tl.constexpr):
    """e^(c - c_end) of tokens in later halves of 2^i tokens and e^(c_end - c) of those in earlier ones, ``end`` being
    the last token of the earlier half."""
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    end = ((rows >> (i + 1)) << (i + 1)) + (1 << i) - 1
    return tl.exp(sums_where((cols > rows) ^ (cols > end), g, NARROW))


@triton.jit
def level_pairs(i, T: tl.constexpr):
    """Whether a row of [T, T] is in the later and a column in the earlier of two halves that belong together."""
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    return (rows >> (i + 1) == cols >> (i + 1)) & (rows >> i > cols >> i)


@triton.jit
def roots_of(
    base, stride, first, seq, eps, NORM: tl.constexpr, D: tl.constexpr, T: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """1 / sqrt(sum(x^2) + eps) of queries or keys of a tile, as [T, 1]; ones without NORM."""
    total = tl.arange(0, T)[:, None].to(tl.float32) * 0.0
    if NORM:
        for low in tl.range(0, D, SLICE, num_stages=STAGES):
            x = rows_of(base, stride, first, seq, low, D, T, SLICE).to(tl.float32)
            total += tl.sum(x * x, axis=1)[:, None]
        total = 1.0 / tl.sqrt(total + eps)
    else:
        total += 1.0
    return total


@triton.jit
def kimi_pairs(
    q_ptr, k_ptr, g_ptr, p_ptr, pairs_ptr, queries_ptr, keys_ptr, grown_ptr, last_ptr,
    count, seq, tiles, levels, scale, eps, q0, q1, q2, k0, k1, k2, g0, g1, g2,
    VALUE_HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr,
    WIDE: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """P and <k, k> [.., T], scale q e^c, k e^(c_C - c) and k e^c [.., WIDE], and e^(c_C) [WIDE] of each tile; strides
    are those of batch, heads and sequence."""
    TYPE: tl.constexpr = p_ptr.dtype.element_ty
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, head = (item % tiles) * T, (item // tiles) % VALUE_HEADS
        batch, head = tl.cast(item // tiles // VALUE_HEADS, tl.int64), tl.cast(head, tl.int64)
        queries, keys = q_ptr + batch * q0 + head * q1, k_ptr + batch * k0 + head * k1
        gates, start = g_ptr + batch * g0 + head * g1, tl.cast(item, tl.int64) * T
        q_root = roots_of(queries, q2, first, seq, eps, NORM, D, T, SLICE) * scale
        k_root = roots_of(keys, k2, first, seq, eps, NORM, D, T, SLICE)
        scores = (rows * 0 + cols * 0).to(tl.float32)
        of_keys = scores
        for low in tl.range(0, WIDE, SLICE, num_stages=STAGES):
            g = rows_of(gates, g2, first, seq, low, D, T, SLICE).to(tl.float32)
            k = rows_of(keys, k2, first, seq, low, D, T, SLICE).to(tl.float32) * k_root
            q = rows_of(queries, q2, first, seq, low, D, T, SLICE).to(tl.float32) * q_root
            scores += tl.where(rows == cols, tl.sum(q * k, axis=1)[:, None], 0.0)
            for i in range(0, levels):
                decay, pairs = level_decays(g, i, NARROW, T), level_pairs(i, T)
                early = tl.trans(k * decay)
                scores += tl.where(pairs, product(q * decay, early, NARROW, TYPE), 0.0)
                of_keys += tl.where(pairs, product(k * decay, early, NARROW, TYPE), 0.0)
            at = low + tl.arange(0, SLICE)
            wide = start * WIDE + rows * WIDE + at[None, :]
            tl.store(keys_ptr + wide, (k * decays_to_end(g, NARROW, T)).to(TYPE))
            grow = decays_from_start(g, NARROW, T)
            tl.store(queries_ptr + wide, (q * grow).to(TYPE))
            tl.store(grown_ptr + wide, (k * grow).to(TYPE))
            tl.store(last_ptr + tl.cast(item, tl.int64) * WIDE + at, tl.exp(tl.sum(g, axis=0)))
        square = start * T + rows * T + cols
        tl.store(p_ptr + square, scores.to(TYPE))
        tl.store(pairs_ptr + square, of_keys)


@triton.jit
def kimi_chunks(
    v_ptr, beta_ptr, pairs_ptr, grown_ptr, t_ptr, u_ptr, w_ptr, count, seq, tiles, v0, v1, v2, b0, b1, b2,
    VALUE_HEADS: tl.constexpr, E: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, LEVELS: tl.constexpr,
    WIDE: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """T [.., T], U [.., E] and W [.., WIDE] of each tile."""
    TYPE: tl.constexpr = u_ptr.dtype.element_ty
    rows, cols, width = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :], tl.arange(0, WIDE)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        first, head = (item % tiles) * T, (item // tiles) % VALUE_HEADS
        batch, head = tl.cast(item // tiles // VALUE_HEADS, tl.int64), tl.cast(head, tl.int64)
        start = tl.cast(item, tl.int64) * T
        square, wide = start * T + rows * T + cols, start * WIDE + rows * WIDE + width
        beta = numbers_of(beta_ptr + batch * b0 + head * b1, b2, first, seq, T)[:, None]
        solved = inverted(tl.load(pairs_ptr + square) * beta, T, LEVELS, NARROW).to(TYPE)
        tl.store(t_ptr + square, solved)
        w = product(solved, tl.load(grown_ptr + wide).to(tl.float32) * beta, NARROW, TYPE)
        tl.store(w_ptr + wide, w.to(TYPE))
        for low in tl.range(0, E, COLUMNS, num_stages=STAGES):
            v = rows_of(v_ptr + batch * v0 + head * v1, v2, first, seq, low, E, T, COLUMNS).to(tl.float32)
            u = product(solved, v * beta, NARROW, TYPE)
            at = low + tl.arange(0, COLUMNS)[None, :]
            tl.store(u_ptr + start * E + rows * E + at, u.to(TYPE), mask=at < E)


@triton.jit
def kimi_states(
    u_ptr, w_ptr, queries_ptr, keys_ptr, p_ptr, last_ptr, state_ptr, out_ptr, final_ptr, starts_ptr,
    count, seq, tiles, spans, o0, o1, o2,
    VALUE_HEADS: tl.constexpr, D: tl.constexpr, E: tl.constexpr, STATE: tl.constexpr, NARROW: tl.constexpr,
    T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr
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
            wide = start * WIDE + rows * WIDE + width[None, :]
            u = tl.load(u_ptr + start * E + rows * E + at, mask=at < E, other=0.0).to(tl.float32)
            u -= product(tl.load(w_ptr + wide), state, NARROW, TYPE)
            out = product(tl.load(queries_ptr + wide), state, NARROW, TYPE)
            p = tl.load(p_ptr + start * T + rows * T + tl.arange(0, T)[None, :])
            out += product(p, u, NARROW, TYPE)
            out_at = out_ptr + batch * o0 + head * o1 + tl.cast(first, tl.int64) * o2 + rows * o2 + at
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(rows < seq - first) & (at < E))
            last = tl.load(last_ptr + (line * tiles + tile) * WIDE + width)
            state = state * last[:, None] + product(tl.trans(tl.load(keys_ptr + wide)), u, NARROW, TYPE)
        tl.store(final_ptr + line * D * E + here, state, mask=inside)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    scale: float,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::kimi_delta_attention``."""
    definition.check(q, k, v, g, beta, state)
    out, final, starts = definition.fake(q, k, v, g, beta, state, scale, norm_eps)
    q, k, v, g = map(rows_of_tokens, (q, k, v, g))
    sizes = Sizes(q, k, v, norm_eps)
    if not sizes.tiles:
        final.zero_() if state is None else final.copy_(state)
        return out, final, starts
    x = Tiles(sizes, q, k, v, g, beta, scale)
    launch(
        kimi_states,
        programs(v, sizes.lines * sizes.parts, WARPS, 16),
        x.u, x.w, x.queries, x.keys, x.p, x.last, starts if state is None else state.contiguous(), out, final, starts,
        sizes.lines * sizes.parts, sizes.seq, sizes.tiles, starts.shape[2], *out.stride()[:3],
        num_warps=WARPS, STATE=state is not None, SPAN=sizes.span, **sizes.constants, **sizes.values,
    )  # fmt: skip
    return out, final, starts


class Sizes:
    """Tiles of a call, and what all kernels are given."""

    def __init__(self, q, k, v, norm_eps):
        self.tokens = tile_tokens(definition.CHUNK)
        self.seq, self.lines = v.shape[2], v.shape[0] * v.shape[1]
        self.levels = self.tokens.bit_length() - 1
        self.tiles, self.span = -(-self.seq // self.tokens), SPAN * definition.CHUNK // self.tokens
        self.eps, self.wide = norm_eps or 0.0, max(16, power_of_two(k.shape[3]))
        self.columns = min(COLUMNS, max(16, power_of_two(v.shape[3])))
        self.parts = -(-v.shape[3] // self.columns)
        self.type = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        self.constants: dict[str, Any] = {
            "VALUE_HEADS": v.shape[1], "D": k.shape[3], "NARROW": is_narrow(self.type, v), "T": self.tokens,
            "WIDE": self.wide,
        }  # fmt: skip
        self.values = {"E": v.shape[3], "COLUMNS": self.columns}
        self.gates = {"NORM": norm_eps is not None, "SLICE": min(SLICE, self.wide)}
        """Of kernels that read or write values; that read queries or keys and gates."""


class Tiles:
    """What is known of all tiles before the first state: U, W, scale q e^c, k e^(c_C - c), k e^c, P, T, <k, k> and
    e^(c_C)."""

    def __init__(self, sizes, q, k, v, g, beta, scale):
        count, constants = sizes.lines * sizes.tiles, sizes.constants

        def new(n: int) -> Tensor:
            return v.new_empty((count, sizes.tokens, n), dtype=sizes.type)

        self.u, self.p, self.t = new(v.shape[3]), new(sizes.tokens), new(sizes.tokens)
        self.w, self.queries, self.keys, self.grown = (new(sizes.wide) for _ in range(4))
        self.pairs = torch.empty_like(self.p, dtype=torch.float32)
        self.last = v.new_empty((count, sizes.wide), dtype=torch.float32)
        strides = [n for x in (q, k, g) for n in x.stride()[:3]]
        launch(
            kimi_pairs,
            programs(v, count, PARTED_WARPS, 16),
            q, k, g, self.p, self.pairs, self.queries, self.keys, self.grown, self.last,
            count, sizes.seq, sizes.tiles, sizes.levels, scale, sizes.eps, *strides,
            num_warps=PARTED_WARPS, **constants, **sizes.gates,
        )  # fmt: skip
        kept = {name: x for name, x in constants.items() if name != "D"}
        launch(
            kimi_chunks,
            programs(v, count, PARTED_WARPS, 16),
            v, beta, self.pairs, self.grown, self.t, self.u, self.w, count, sizes.seq, sizes.tiles,
            *v.stride()[:3], *beta.stride()[:3],
            num_warps=PARTED_WARPS, LEVELS=sizes.levels, **kept, **sizes.values,
        )  # fmt: skip
