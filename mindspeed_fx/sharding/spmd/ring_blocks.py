"""Attention over a divided sequence by the schedule of :mod:`mindspeed_fx.sharding.spmd.block_schedule`: masks,
windows, and causal attention whose lengths no ring divides.

Blocks of queries go to the rank that computes them, and their results back; keys and values come in stages, sent before
the attention of the stage before. A row's result over several blocks of keys is their mean by share of the softmax, as
in ``mindspeed::ring_attention_update``, for all pairs of a stage at once. The backward asks for the keys again and
sends their gradients back.

Local tensors are stored block by block here, [blocks, batch * heads, rows, dim]: a pair of blocks is a row of the
batch, and heads that share keys stay neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_fx.compat import dtensor
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.sharding.spmd.block_schedule import BlockSchedule, Stage
from mindspeed_fx.sharding.spmd.expected_collectives import sends_inside

ops = torch.ops.mindspeed


@dataclass(frozen=True, eq=False)
class Exchange:
    """A schedule on a mesh dimension."""

    mesh: Any
    dim: int
    ranks: int
    rows: int
    """Of a block."""
    schedule: BlockSchedule
    causal: bool
    window: int
    scale: float
    softcap: float

    def announced(self, q: DTensor, k: DTensor, v: DTensor) -> None:
        """Says what the schedule sends (:mod:`mindspeed_fx.sharding.spmd.expected_collectives`): blocks of queries
        there and results back, and the keys of each stage; backward also their gradients.
        """
        numel, blocks = dtensor.local_numel, self.schedule.per_rank
        queries, keys = numel(q), (numel(k) + numel(v)) // blocks
        for backward in (False, True):
            for stage in (s for s in self.schedule.stages if s.received):
                for itemsize in (k.dtype.itemsize, accumulation_dtype(q.dtype).itemsize)[: 1 + backward]:
                    sends_inside(
                        "all_to_all", self.dim, stage.received * keys * itemsize, backward, "attention by blocks"
                    )
            for width in (q.shape[3], v.shape[3]) if self.schedule.moved else ():
                sends_inside(
                    "all_to_all",
                    self.dim,
                    queries // q.shape[3] * width * q.dtype.itemsize,
                    backward,
                    "attention by blocks",
                )

    def own(self, table: Sequence[Any], device: torch.device) -> Tensor:
        """This rank's entry of ``table``, one per rank."""
        return dtensor.entry_by_coordinate(self.mesh, self.dim, table, device)

    def sent(self, x: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Rows of ``x`` to every rank, to be waited for; ``counts`` [from][to]."""
        arguments, taken = (
            [
                dtensor.by_coordinate(
                    self.mesh, self.dim, lambda r, j=j, back=back: counts[j][r] if back else counts[r][j]
                )
                for j in range(self.ranks)
            ]
            for back in (False, True)
        )
        return dtensor.all_to_all(x, taken, arguments, self.mesh, self.dim)

    def to_computing(self, *tensors: Tensor) -> list[Tensor]:
        """Of each [blocks, ...], one per block of queries: from the ranks that hold them to those that compute them;
        one message.
        """
        if not self.schedule.moved:
            return list(tensors)
        order, counts = self._moves()
        flat = _flat(tensors).index_select(0, self.own(order, tensors[0].device))
        return _split_parts(dtensor.wait_for(self.sent(flat, counts)), tensors)

    def to_holding(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`to_computing`."""
        if not self.schedule.moved:
            return x
        order, counts = self._moves()
        back = dtensor.wait_for(self.sent(x.flatten(1), [list(c) for c in zip(*counts)]))
        inverse = [[o.index(i) for i in range(len(o))] for o in order]
        return back.index_select(0, self.own(inverse, x.device)).view(x.shape)

    def _moves(self) -> tuple[list[list[int]], list[list[int]]]:
        """By rank: its blocks in the order of who computes them; [from][to] how many. They arrive ascending, as they
        are listed.
        """
        per_rank, owner = self.schedule.per_rank, {q: r for r, own in enumerate(self.schedule.queries) for q in own}
        order = [sorted(range(per_rank), key=lambda i: (owner[r * per_rank + i], i)) for r in range(self.ranks)]
        return order, [
            [sum(owner[r * per_rank + i] == to for i in range(per_rank)) for to in range(self.ranks)]
            for r in range(self.ranks)
        ]

    def fetch(self, stage: Stage, keys: Tensor) -> Callable[[], Tensor]:
        """Starts to send the blocks of keys of a stage; what it returns gives them, behind the rank's own, when they
        are there.
        """
        if not stage.received:
            return lambda: keys
        message = self.sent(keys.index_select(0, self.own(stage.messages, keys.device)), stage.counts)
        return lambda: torch.cat([keys, dtensor.wait_for(message)])

    def give_back(self, stage: Stage, gradients: Tensor) -> Callable[[Tensor], Tensor]:
        """Starts to send the gradients of the keys of a stage to who holds them; what it returns adds them up."""
        per_rank = self.schedule.per_rank
        own, others = gradients.split([per_rank, stage.received])
        if not stage.received:
            return lambda total: total + own
        message = self.sent(others, list(zip(*stage.counts)))
        held = self.own([_one_hot(messages, per_rank) for messages in stage.messages], own.device).to(own.dtype)
        return lambda total: total + own + held @ dtensor.wait_for(message)

    def pairs(self, stage: Stage, device: torch.device) -> "_Pairs":
        first = [
            [[own[p[0]] if p[2] >= 0 else 0 for p in pairs] for own, pairs in zip(self.schedule.queries, stage.pairs)],
            [[max(p[2], 0) for p in pairs] for pairs in stage.pairs],
        ]
        real = [[p[2] >= 0 for p in pairs] for pairs in stage.pairs]
        query, key, row, column, count = (
            self.own(t, device)
            for t in ([[p[0] for p in x] for x in stage.pairs], [[p[1] for p in x] for x in stage.pairs], *first, real)
        )
        every_key = [_one_hot([p[1] for p in x], self.schedule.per_rank + stage.received) for x in stage.pairs]
        every_query = [_one_hot([p[0] if p[2] >= 0 else -1 for p in x], self.schedule.per_rank) for x in stage.pairs]
        return _Pairs(
            query,
            key,
            row,
            column,
            count,
            self.own(every_query, device),
            self.own(every_key, device),
            all(p[2] >= 0 for x in stage.pairs for p in x),
        )

    def mask(self, pairs: "_Pairs", mask: Tensor | None, batch: int, heads: int) -> Tensor | None:
        """[pairs, 1 or batch * heads, rows, rows]: which scores count, or what is added to them; None: all. ``mask`` is
        :meth:`blocked`.
        """
        if pairs.full and mask is None and not self.causal:
            return None
        keep = pairs.count.view(-1, 1, 1)
        if self.causal:
            inside = torch.arange(self.rows, device=keep.device)
            query, key = (
                x.view(-1, 1, 1) * self.rows + inside.view(shape)
                for x, shape in ((pairs.row, (1, -1, 1)), (pairs.column, (1, 1, -1)))
            )
            keep = keep.logical_and(key <= query)
            if self.window:
                keep = keep.logical_and(query - key < self.window)
        keep = keep.expand(-1, self.rows, self.rows).unsqueeze(1)
        if mask is None:
            return keep
        rows, columns = mask.shape[:2]
        part = (
            mask[0, 0].unsqueeze(0)
            if rows * columns == 1
            else mask.flatten(0, 1).index_select(
                0, pairs.column if rows == 1 else pairs.row * columns + (0 if columns == 1 else pairs.column)
            )
        )
        # [pairs, batch, heads, rows, rows], or batch and heads together where the mask is the same for all
        part = (
            part.flatten(1, 2)
            if part.shape[1] * part.shape[2] == 1
            else part.expand(-1, batch, heads, -1, -1).flatten(1, 2)
        )
        return keep.logical_and(part) if part.dtype == torch.bool else torch.where(keep, part, -math.inf)

    def blocked(self, mask: Tensor) -> Tensor:
        """A mask [batch, heads, queries, keys], each of them 1 where it is broadcast, as [blocks of queries, blocks of
        keys, batch, heads, rows, rows].
        """
        blocks = self.ranks * self.schedule.per_rank
        parts = [(blocks, self.rows) if n > 1 else (1, 1) for n in mask.shape[2:]]
        return mask.unflatten(3, parts[1]).unflatten(2, parts[0]).permute(2, 4, 0, 1, 3, 5)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """One stage's pairs of blocks on this rank, tensors [pairs] and matrices of zeros and ones."""

    query: Tensor
    key: Tensor
    row: Tensor
    column: Tensor
    count: Tensor
    every_query: Tensor
    """[blocks of queries, pairs]."""
    every_key: Tensor
    """[blocks of keys, pairs]."""
    full: bool
    """No rank has fillers."""


def _one_hot(places: Sequence[int], size: int) -> list[list[bool]]:
    return [[p == i for p in places] for i in range(size)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.flatten(1) for t in tensors], 1)


def _split_parts(x: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = x.split([t.numel() // t.shape[0] for t in like], 1)
    return [p.unflatten(1, t.shape[1:]) for p, t in zip(parts, like)]


def _to_blocks(x: Tensor, blocks: int) -> Tensor:
    """[batch, heads, sequence, ...] as [blocks, batch * heads, rows, ...]."""
    return x.unflatten(2, (blocks, -1)).movedim(2, 0).flatten(1, 2)


def _from_blocks(x: Tensor, batch: int) -> Tensor:
    return x.unflatten(1, (batch, -1)).movedim(0, 2).flatten(2, 3)


def _sum_by_block(one_hot: Tensor, x: Tensor) -> Tensor:
    """[pairs, ...] summed by block."""
    return (one_hot.to(x.dtype) @ x.flatten(1)).view(one_hot.shape[0], *x.shape[1:])


def _weighted_sum(x: Tensor, exponent: Tensor) -> Tensor:
    return x * exponent.exp().nan_to_num(0.0).unsqueeze(-1)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """``out`` [..., heads, rows, dim] and ``lse`` with one more score for each of ``sinks`` [heads], which has no
    value.
    """
    new = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(1))
    return _weighted_sum(out, lse - new), new


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of ``sinks``: a sink meets no value, so that it is minus its share times rowsum(dO * O), summed over all
    rows.
    """
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -((sinks.to(lse.dtype).unsqueeze(1) - lse).exp() * delta).sum((0, 2)).to(sinks.dtype)


class ScheduledAttention(torch.autograd.Function):
    """On local tensors: q, k, v [batch, heads, sequence / ranks, dim], a mask of the whole sequence, and sinks
    [heads].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, factor: Exchange
    ) -> Tensor:
        blocks, stages, wide = factor.schedule.per_rank, factor.schedule.stages, accumulation_dtype(q.dtype)
        shapes = [(blocks, x.shape[0] * x.shape[1], factor.rows, x.shape[3]) for x in (k, v)]
        (qs,) = factor.to_computing(_to_blocks(q, blocks))
        keys = _flat([_to_blocks(x, blocks) for x in (k, v)])
        out, lse = (
            qs.new_zeros((*qs.shape[:3], v.shape[3]), dtype=wide),
            qs.new_full(qs.shape[:3], -math.inf, dtype=wide),
        )
        mask = None if mask is None else factor.blocked(mask)
        coming = factor.fetch(stages[0], keys)
        for number, stage in enumerate(stages):
            here = coming()
            if number + 1 < len(stages):
                coming = factor.fetch(stages[number + 1], keys)
            pairs = factor.pairs(stage, q.device)
            ks, vs = _taken_keys(here, pairs, shapes)
            allowed = factor.mask(pairs, mask, *q.shape[:2])
            block, block_lse = ops.attention(
                qs.index_select(0, pairs.query), ks, vs, allowed, False, factor.scale, 0, factor.softcap
            )
            if (
                allowed is not None
            ):  # what kernels say of rows without any key differs: ATen's flash kernel on CPU says 0
                block_lse = torch.where(
                    (allowed if allowed.dtype == torch.bool else allowed > -math.inf).any(-1), block_lse, -math.inf
                )
            own = pairs.every_query.view(*pairs.every_query.shape, 1, 1)
            new = torch.logaddexp(lse, torch.where(own, block_lse, -math.inf).logsumexp(1))
            out = _weighted_sum(out, lse - new) + _sum_by_block(
                pairs.every_query, _weighted_sum(block.to(wide), block_lse - new.index_select(0, pairs.query))
            )
            lse = new
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks.repeat(q.shape[0]))
        out, ctx.by, ctx.shapes, ctx.batch = out.to(q.dtype), factor, shapes, q.shape[0]
        lse = torch.where(
            lse == -math.inf, 0.0, lse
        )  # all scores of such a row are -inf, and so are they less any number
        ctx.save_for_backward(qs, keys, out, lse, mask, sinks)
        return _from_blocks(factor.to_holding(out), q.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factor, shapes, (qs, keys, out, lse, mask, sinks) = ctx.by, ctx.shapes, ctx.saved_tensors
        stages, wide, heads = factor.schedule.stages, accumulation_dtype(qs.dtype), qs.shape[1] // ctx.batch
        (grad,) = factor.to_computing(_to_blocks(grad, factor.schedule.per_rank))
        dq, dkeys = torch.zeros_like(qs, dtype=wide), torch.zeros_like(keys, dtype=wide)
        coming, arriving = factor.fetch(stages[0], keys), lambda total: total
        for number, stage in enumerate(stages):
            here = coming()
            if number + 1 < len(stages):
                coming = factor.fetch(stages[number + 1], keys)
            pairs = factor.pairs(stage, qs.device)
            ks, vs = _taken_keys(here, pairs, shapes)
            arguments = [x.index_select(0, pairs.query) for x in (grad, qs, out, lse)]
            parts = ops.attention_backward(
                *arguments[:2],
                ks,
                vs,
                *arguments[2:],
                factor.mask(pairs, mask, ctx.batch, heads),
                False,
                factor.scale,
                0,
                factor.softcap,
            )
            dq = dq + _sum_by_block(pairs.every_query, parts[0].to(wide))
            dkeys = arriving(dkeys)
            arriving = factor.give_back(stage, _sum_by_block(pairs.every_key, _flat(parts[1:]).to(wide)))
        dk, dv = (
            _from_blocks(x, ctx.batch)
            for x in _split_parts(arriving(dkeys), [keys.new_empty(s, device="meta") for s in shapes])
        )
        dsinks = None
        if sinks is not None:
            dsinks = sinks_gradient(grad, out, lse, sinks.repeat(ctx.batch)).view(ctx.batch, heads).sum(0)
        dq = _from_blocks(factor.to_holding(dq.to(qs.dtype)), ctx.batch)
        return dq, dk.to(keys.dtype), dv.to(keys.dtype), None, dsinks, None


def _taken_keys(here: Tensor, pairs: _Pairs, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    parts = here.index_select(0, pairs.key).split([math.prod(s[1:]) for s in shapes], 1)
    return [p.unflatten(1, s[1:]) for p, s in zip(parts, shapes)]
