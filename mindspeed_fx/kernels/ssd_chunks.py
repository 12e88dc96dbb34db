"""One chunk of tokens of a state space dual, for some heads of one row: forward and gradients as products of ATen.

Letters and formulas as at the top of ssd.py. Rows of x stay as the model has them, [tokens, heads, p], and heads that
share B and C meet them in one product: [tokens, n] times [n, heads * p].
"""

from __future__ import annotations

from typing import Iterator, NamedTuple

import torch
from torch import Tensor

SPAN = 4
"""Chunks from one state that the backward is given to the next."""

HEADS = 64
"""Heads that are computed together: their state and what stands inside a chunk stay small beside the arguments."""


class Heads(NamedTuple):
    """Some heads of one row of the batch, and the groups of B and C that they read."""

    row: int
    own: slice
    groups: slice


def head_blocks(x: Tensor, b: Tensor) -> Iterator[Heads]:
    """Every head once: whole groups, or a part of one."""
    shared = x.shape[2] // b.shape[2]
    number = max(1, HEADS // shared)
    for row in range(x.shape[0]):
        for group in range(0, b.shape[2], number):
            groups = slice(group, min(group + number, b.shape[2]))
            first, last = group * shared, groups.stop * shared
            for low in range(first, last, HEADS if shared > HEADS else last - first):
                yield Heads(row, slice(low, min(low + HEADS, last) if shared > HEADS else last), groups)


def chunk_slices(seq: int, chunk: int) -> list[slice]:
    """The sequence in chunks, the last as short as it is."""
    return [slice(low, min(low + chunk, seq)) for low in range(0, seq, chunk)]


def _decay(sums: Tensor, wide: torch.dtype) -> Tensor:
    """e^(c_i - c_j) for i >= j, else zero [h, t, t], of sums c [h, t] in float64.

    In float32 a difference of rounded sums would be as wrong as the sums are large; what rounding took off is added
    after the large parts have gone.
    """
    t = sums.shape[1]
    above = torch.full((t, t), float("-inf"), dtype=wide, device=sums.device).triu_(1)
    high = sums.to(wide)
    decay = (high.unsqueeze(2) - high.unsqueeze(1)).add_(above)
    if wide != torch.float64:
        low = (sums - high).to(wide)
        decay.add_(low.unsqueeze(2)).sub_(low.unsqueeze(1))
    return decay.exp_()


class Chunk:
    """What is known of a chunk before its state is. t tokens, h heads in g groups; a state is [g, h / g * p, n]."""

    def __init__(self, heads: Heads, tokens: slice, x, dt, a, b, c, wide: torch.dtype):
        self.x = x[heads.row, tokens, heads.own].to(wide).contiguous()
        self.dt = dt[heads.row, tokens, heads.own].to(wide)
        self.a = a[heads.own].to(wide)
        # [g, t, n]
        self.b, self.c = (y[heads.row, tokens, heads.groups].to(wide).transpose(0, 1) for y in (b, c))
        sums = (self.dt.double() * self.a.double()).cumsum(0)
        self.grow, self.rest, self.last = (y.exp().to(wide) for y in (sums, sums[-1] - sums, sums[-1]))
        self.steps = self.x * self.dt.unsqueeze(-1)
        self.decay = _decay(sums.t(), wide)  # [h, t, t]

    @property
    def heads(self) -> int:
        """Of a group."""
        return self.x.shape[1] // self.b.shape[0]

    def by_group(self, x: Tensor) -> Tensor:
        """[t, h, p] as [g, t, h / g * p]"""
        return x.flatten(1).unflatten(1, (self.b.shape[0], self.heads * x.shape[2])).transpose(0, 1)

    def by_token(self, x: Tensor) -> Tensor:
        """[g, t, h / g * p] as [t, h, p]"""
        return x.unflatten(2, (self.heads, self.x.shape[2])).transpose(0, 1).flatten(1, 2)

    def of_state(self, x: Tensor) -> Tensor:
        """[h], for the rows of a state"""
        return x.unsqueeze(-1).expand(-1, self.x.shape[2]).reshape(self.b.shape[0], self.heads * self.x.shape[2], 1)

    def scores(self) -> Tensor:
        """M [h, t, t]"""
        products = torch.bmm(self.c, self.b.transpose(1, 2)).unsqueeze(1)
        return (self.decay.unflatten(0, (products.shape[0], -1)) * products).flatten(0, 1)

    def result(self, state: Tensor) -> Tensor:
        """[t, h, p]"""
        before = self.by_token(torch.bmm(self.c, state.transpose(1, 2))) * self.grow.unsqueeze(-1)
        return before.add_(torch.bmm(self.scores(), self.steps.transpose(0, 1)).transpose(0, 1))

    def remaining_steps(self) -> Tensor:
        """K X as [g, t, h / g * p]"""
        return self.by_group(self.steps * self.rest.unsqueeze(-1))

    def next_state(self, state: Tensor, out: Tensor) -> Tensor:
        torch.mul(state, self.of_state(self.last), out=out)
        return out.baddbmm_(self.remaining_steps().transpose(1, 2), self.b)

    def gradients(self, dout: Tensor, state: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        """Gradients of x, dt, A, B, C, and of the state before the chunk; ``dstate`` is that of the one after it.

        With W = dM * M and Z = e^c C S^T: dX = M^T dY + K B dS^T; the gradient of c is the sum of W over its row less
        that over its column, plus dY Z^T less X (K B dS^T)^T, and at the last token what the next state adds.
        """
        by_head = dout.transpose(0, 1)
        scores = self.scores()
        grown = dout * self.grow.unsqueeze(-1)
        after = self.by_token(torch.bmm(self.b, dstate.transpose(1, 2))) * self.rest.unsqueeze(-1)
        # Gradients of c nearly cancel when they are summed: the small sums are in float64.
        dsums = (self.by_token(torch.bmm(self.c, state.transpose(1, 2))) * grown).sum(-1).double()
        kept = (after * self.steps).sum(-1).double()
        dsums -= kept
        dsums[-1] += (
            kept.sum(0) + (state * dstate).unflatten(1, (self.heads, self.x.shape[2])).sum((2, 3)).flatten() * self.last
        )
        dsteps = after.add_(torch.bmm(scores.transpose(1, 2), by_head).transpose(0, 1))
        dscores = torch.bmm(by_head, self.steps.permute(1, 2, 0))
        pairs = scores.mul_(dscores)
        pairs.diagonal(dim1=1, dim2=2).zero_()
        dsums += (pairs.sum(2, dtype=torch.float64) - pairs.sum(1, dtype=torch.float64)).t()
        products = dscores.mul_(self.decay).unflatten(0, (self.b.shape[0], -1)).sum(1)
        grown = self.by_group(grown)
        dc = torch.bmm(products, self.b).baddbmm_(grown, state)
        db = torch.bmm(products.transpose(1, 2), self.c).baddbmm_(self.remaining_steps(), dstate)
        before = (dstate * self.of_state(self.last)).baddbmm_(grown.transpose(1, 2), self.c)
        dlog = dsums.flip(0).cumsum(0).flip(0)
        ddt = (dsteps * self.x).sum(-1).addcmul_(dlog.to(dsteps.dtype), self.a)
        return dsteps.mul_(self.dt.unsqueeze(-1)), ddt, (dlog * self.dt).sum(0), db, dc, before
