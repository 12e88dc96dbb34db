"""Mamba-2's state space dual in Triton: a program walks through the tiles of tokens of a head, with some rows of its
state [COLUMNS of p, n] on chip.

Letters and formulas as at the top of mindspeed_fx/kernels/ssd.py, whose chunks here are tiles. Products are taken in
the type of x, B and C; sums and states are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import ssd as definition
from mindspeed_fx.kernels.ssd_chunks import SPAN
from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs
from mindspeed_fx.kernels.triton.recurrence import (
    STAGES,
    WARPS,
    decays,
    is_narrow,
    last_of,
    numbers_of,
    product,
    rows_of,
    sums_before,
)

TOKENS = 32
"""Most tokens of a tile."""
COLUMNS = 32
"""Of x and rows of a state that a program walks with at most."""


@triton.jit
def ssd_states(
    x_ptr, dt_ptr, a_ptr, b_ptr, c_ptr, d_ptr, state_ptr, out_ptr, final_ptr, starts_ptr, count, seq, tiles, spans,
    x0, x1, x2, s0, s1, s2, b0, b1, b2, c0, c1, c2,
    X_HEADS: tl.constexpr, SHARED: tl.constexpr, P: tl.constexpr, N: tl.constexpr, SKIP: tl.constexpr,
    STATE: tl.constexpr, NARROW: tl.constexpr, T: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr
):  # fmt: skip
    """The result [batch, seq, X_HEADS, P], the states before every SPAN tiles and the last one. Strides are those of
    batch, sequence and heads or groups."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    PARTS: tl.constexpr = (P + COLUMNS - 1) // COLUMNS
    rows, width = tl.arange(0, T)[:, None], tl.arange(0, WIDE)[None, :]
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        line, low = tl.cast(item // PARTS, tl.int64), (item % PARTS) * COLUMNS
        batch, head = line // X_HEADS, line % X_HEADS
        at, own = low + tl.arange(0, COLUMNS)[None, :], low + tl.arange(0, COLUMNS)[:, None]
        here, inside = own * N + width, (own < P) & (width < N)
        rate = tl.load(a_ptr + head).to(tl.float32)
        state = (own * 0 + width * 0).to(tl.float32)
        if STATE:
            state = tl.load(state_ptr + line * P * N + here, mask=inside, other=0.0).to(tl.float32)
        for tile in tl.range(0, tiles, num_stages=STAGES):
            if tile % SPAN == 0:
                start = starts_ptr + ((batch * spans + tile // SPAN) * X_HEADS + head) * P * N
                tl.store(start + here, state, mask=inside)
            first = tile * T
            dt = numbers_of(dt_ptr + batch * s0 + head * s2, s1, first, seq, T)
            sums = sums_before(dt * rate, T)
            b = rows_of(b_ptr + batch * b0 + head // SHARED * b2, b1, first, seq, 0, N, T, WIDE)
            c = rows_of(c_ptr + batch * c0 + head // SHARED * c2, c1, first, seq, 0, N, T, WIDE)
            x = rows_of(x_ptr + batch * x0 + head * x2, x1, first, seq, low, P, T, COLUMNS).to(tl.float32)
            out = product(c, tl.trans(state), NARROW, TYPE) * tl.exp(sums)[:, None]
            scores = product(c, tl.trans(b), NARROW, TYPE) * decays(sums, T)
            out += product(scores, x * dt[:, None], NARROW, TYPE)
            if SKIP:
                out += x * tl.load(d_ptr + head).to(tl.float32)
            out_at = out_ptr + ((batch * seq + first) * X_HEADS + head) * P + rows * (X_HEADS * P) + at
            tl.store(out_at, out, mask=(rows < seq - first) & (at < P))
            last = last_of(sums, T)
            x *= (dt * tl.exp(last - sums))[:, None]
            state = state * tl.exp(last) + product(tl.trans(x), b, NARROW, TYPE)
        tl.store(final_ptr + line * P * N + here, state, mask=inside)


class Sizes:
    """Tiles of a call, and what all kernels are given."""

    def __init__(self, x: Tensor, b: Tensor, c: Tensor, chunk: int):
        self.tokens = tile_tokens(chunk)
        self.batch, self.seq, self.heads, self.p = x.shape
        self.groups, self.n = b.shape[2:]
        self.lines, self.tiles = self.batch * self.heads, -(-self.seq // self.tokens)
        self.span = SPAN * chunk // self.tokens
        self.type = torch.promote_types(torch.promote_types(x.dtype, b.dtype), c.dtype)
        self.columns = min(COLUMNS, max(16, power_of_two(self.p)))
        self.parts = -(-self.p // self.columns)
        self.wide = max(16, power_of_two(self.n))
        self.constants: dict[str, Any] = {
            "X_HEADS": self.heads, "SHARED": self.heads // self.groups, "P": self.p, "N": self.n, "T": self.tokens,
            "WIDE": self.wide, "COLUMNS": self.columns, "NARROW": is_narrow(self.type, x),
        }  # fmt: skip


def tile_tokens(chunk: int) -> int:
    """Tokens of a tile: the largest power of two up to :data:`TOKENS` that divides those between kept states."""
    span = SPAN * chunk
    return min(TOKENS, span & -span)


def tight(x: Tensor) -> Tensor:
    """``x`` with adjacent elements in its last dimension: what is laid out otherwise is copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor | None,
    chunk: int = definition.CHUNK,
) -> tuple[Tensor, Tensor, Tensor]:
    """``mindspeed::ssd``."""
    definition.check(x, dt, A, B, C, D, state, chunk)
    out, final, starts = definition.fake(x, dt, A, B, C, D, state, chunk)
    sizes = Sizes(x, B, C, chunk)
    if not sizes.tiles:
        final.zero_() if state is None else final.copy_(state)
        return out, final, starts
    x, B, C, A = tight(x), tight(B), tight(C), A.contiguous()
    number = sizes.lines * sizes.parts
    launch(
        ssd_states,
        programs(x, number, WARPS, 16),
        x, dt, A, B, C, A if D is None else D.contiguous(), A if state is None else state.contiguous(), out, final,
        starts, number, sizes.seq, sizes.tiles, starts.shape[1],
        *x.stride()[:3], *dt.stride(), *B.stride()[:3], *C.stride()[:3],
        num_warps=WARPS, SKIP=D is not None, STATE=state is not None, SPAN=sizes.span, **sizes.constants,
    )  # fmt: skip
    return out, final, starts
