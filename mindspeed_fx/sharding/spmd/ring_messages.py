"""Who sends what to whom in ring attention: chunks to and from the ranks that balance them, keys and values round the
ring, and their gradients behind them.
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
from mindspeed_fx.sharding.spmd.expected_collectives import sends_inside


@dataclass(frozen=True, eq=False)
class Ring:
    """Who sends what to whom."""

    mesh: Any
    dim: int
    ranks: int
    causal: bool
    scale: float
    softcap: float
    window: int
    """Ranks of an inner ring; all of them where there is one ring."""
    keeps: str | None = None
    """What the backward has from the forward of other ranks: "full": keys and values; "half": keys, while values go
    round again; None: nothing (MindSpeed's context-parallel-kv-cache-policy).
    """
    dropout: float = 0.0
    """Of the weights, where ``keep`` is given."""

    @property
    def rounds(self) -> int:
        """How often the inner rings are gone round, each time with the keys of another window."""
        return self.ranks // self.window

    def steps(self) -> list[tuple[int, int]]:
        """(round, step) in order, but for the first: those with another rank's keys."""
        return [(o, i) for o in range(self.rounds) for i in range(self.window)][1:]

    def of_step(self, x: Tensor, round_: int, step: int) -> Tensor:
        """``x``, as a value of this step alone. Which of its chunks a step takes is another number on every rank, and a
        rank that takes the same one in two steps would else have a node less, where equal nodes are made one."""
        return x.expand(self.ranks, *x.shape).select(0, round_ * self.window + step)

    def owner(self, r: int, round_: int, step: int) -> int:
        """Whose keys rank ``r`` has then."""
        w = self.window
        return (r // w - round_) % self.rounds * w + (r - step) % w

    def announced(self, q: DTensor, k: DTensor, v: DTensor) -> None:
        """Says what a ring sends (:mod:`mindspeed_fx.sharding.spmd.expected_collectives`): keys and values n - 1 times,
        in the backward again and their gradients once round every ring, in the type that sums are made in; if causal
        also the exchange of chunks before and after."""
        numel, wide = dtensor.local_numel, accumulation_dtype(q.dtype).itemsize
        keys, gradients, out = (
            (numel(k) + numel(v)) * k.dtype.itemsize,
            (numel(k) + numel(v)) * wide,
            numel(q) // q.shape[3] * v.shape[3] * q.dtype.itemsize,
        )
        everything, hops = (
            numel(q) * q.dtype.itemsize + keys,
            self.ranks * (self.window > 1) + self.rounds * (self.rounds > 1),
        )
        for backward in (False, True):
            for nbytes, times in (
                (keys, self.ranks - 1),
                (gradients, hops * backward),
                (everything, int(self.causal)),
                (out, int(self.causal)),
            ):
                for _ in range(times):
                    sends_inside("all_to_all", self.dim, nbytes, backward, "ring attention")

    def kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """What the forward keeps of a step's keys and values."""
        return {"full": (k, v), "half": (k,), None: ()}[self.keeps]

    def mask_for(self, mask: Tensor | None, round_: int, step: int) -> Tensor | None:
        """The columns of ``mask`` [..., sequence], in the order of the ranks, for the keys that a rank has then."""
        if mask is None:
            return None
        owner = self.by_rank(lambda r: self.owner(r, round_, step))
        return in_parts(mask, mask.ndim - 1, self.ranks).select(-2, owner)

    def by_rank(self, value: Callable[[int], int]) -> int:
        """``value(rank)`` on each rank of the ring."""
        return dtensor.by_coordinate(self.mesh, self.dim, value)

    def exchange(self, x: Tensor, messages: Callable[[int, int], int], receives: Callable[[int, int], int]) -> Tensor:
        """Rows of ``x`` to every rank, to be waited for; ``sends(rank, other)`` and ``receives(rank, other)`` count
        them.
        """
        n = range(self.ranks)
        return dtensor.all_to_all(
            x,
            [self.by_rank(lambda r, j=j: receives(r, j)) for j in n],
            [self.by_rank(lambda r, j=j: messages(r, j)) for j in n],
            self.mesh,
            self.dim,
        )

    def passed_on(self, *tensors: Tensor, far: bool = False) -> "_Sent":
        """Each tensor to the next rank of the inner ring, or, ``far``, to the one at the same place of the next window;
        in one message.
        """
        flat = torch.cat([t.reshape(-1) for t in tensors])
        size, n, w = flat.shape[0], self.ranks, self.window
        to = (lambda r, factor: (r + factor * w) % n) if far else (lambda r, factor: r // w * w + (r + factor) % w)

        def along(factor: int) -> Callable[[int, int], int]:
            return lambda r, j: size if j == to(r, factor) else 0

        return _Sent(self.exchange(flat, along(1), along(-1)), [t.shape for t in tensors])

    def balanced(self, *tensors: Tensor) -> list[Tensor]:
        """Of each [batch, heads, sequence / ranks, ...], chunks 2r and 2r+1 become chunks r and 2n-1-r; one message."""
        if not self.causal:
            return list(tensors)
        chunks = self._in_order(_chunks(tensors))
        return _join_chunks(
            dtensor.wait_for(self.exchange(chunks, self._chunks_from_to, lambda r, j: self._chunks_from_to(j, r))),
            tensors,
        )

    def restored(self, *tensors: Tensor) -> list[Tensor]:
        """The inverse of :meth:`balanced`."""
        if not self.causal:
            return list(tensors)
        chunks = dtensor.wait_for(
            self.exchange(_chunks(tensors), lambda r, j: self._chunks_from_to(j, r), self._chunks_from_to)
        )
        return _join_chunks(self._in_order(chunks), tensors)

    def _owner(self, chunk: int) -> int:
        return min(chunk, 2 * self.ranks - 1 - chunk)

    def _chunks_from_to(self, r: int, j: int) -> int:
        return (self._owner(2 * r) == j) + (self._owner(2 * r + 1) == j)

    def _in_order(self, chunks: Tensor) -> Tensor:
        """The two chunks in the order of the ranks that they belong to; its own inverse."""
        first = self.by_rank(lambda r: int(self._owner(2 * r) > self._owner(2 * r + 1)))
        second = self.by_rank(lambda r: int(self._owner(2 * r) <= self._owner(2 * r + 1)))
        return torch.cat([chunks.narrow(0, first, 1), chunks.narrow(0, second, 1)])

    def blocks(self, round_: int, step: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Two pairs (chunk of queries, chunk of keys) of what a rank computes with the keys that it has then: its
        second chunk sees their first, and then, if they come from before, its first chunk sees their first, else its
        second their second."""
        other = self.by_rank(lambda r: 0 if self.owner(r, round_, step) < r else 1)
        return (1, 0), (other, other)


def take_half(x: Tensor, number: int, dim: int) -> Tensor:
    """The first (0) or second (1) half of ``x`` along ``dim``."""
    return in_parts(x, dim, 2).select(dim, number)


def in_parts(x: Tensor, dim: int, count: int) -> Tensor:
    """``x`` with its ``count`` parts along ``dim`` in a dimension of their own, before it. A view: Dynamo does not
    capture ``Tensor.unflatten`` where a mode of torch's functions watches, as with Megatron's generators."""
    return x.view(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])


@dataclass
class _Sent:
    flat: Tensor
    shapes: list[torch.Size]

    def received(self) -> list[Tensor]:
        parts = dtensor.wait_for(self.flat).split([math.prod(s) for s in self.shapes])
        return [p.view(s) for p, s in zip(parts, self.shapes)]


def _chunks(tensors: Sequence[Tensor]) -> Tensor:
    """[2, elements of all]: both halves of each sequence."""
    return torch.cat([in_parts(x, 2, 2).movedim(2, 0).reshape(2, -1) for x in tensors], 1)


def _join_chunks(chunks: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Of each the halves, one behind the other. A half is written as the product of its sizes: of the half of a product
    torch would not see that the last size is a number."""
    shapes = [(*x.shape[:2], x.shape[2] // 2, *x.shape[3:]) for x in like]
    parts = chunks.split([math.prod(shape) for shape in shapes], 1)
    return [p.reshape(2, *shape).movedim(0, 2).flatten(2, 3) for p, shape in zip(parts, shapes)]


class RotatingKeys:
    """Keys and values on their way: those of the next step, and those of the next round."""

    def __init__(self, ring: Ring, *keys: Tensor):
        self.ring = ring
        self._begin(0, keys)

    def _begin(self, round_: int, keys: Sequence[Tensor]) -> None:
        self.far = self.ring.passed_on(*keys, far=True) if round_ < self.ring.rounds - 1 else None
        self.near = self.ring.passed_on(*keys) if self.ring.window > 1 else None

    def on(self, round_: int, step: int) -> Sequence[Tensor]:
        """Those of this step, after those that come next are on their way."""
        if not step:
            keys = self.far.received()
            self._begin(round_, keys)
            return keys
        keys = self.near.received()
        self.near = self.ring.passed_on(*keys) if step < self.ring.window - 1 else None
        return keys


class KeptKeys:
    """Keys and values in the backward: what :meth:`Ring.kept` kept, and the rest goes round again."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor, kept: Sequence[Tensor]):
        self.each = len(ring.kept(k, v))
        self.kept = list(kept)
        self.travel = RotatingKeys(ring, *(k, v)[self.each :]) if self.each < 2 else None

    def on(self, round_: int, step: int) -> Sequence[Tensor]:
        """Those of this step; steps are asked for in their order."""
        kept, self.kept = self.kept[: self.each], self.kept[self.each :]
        return kept if self.travel is None else [*kept, *self.travel.on(round_, step)]


class RotatingGradients:
    """Gradients of keys and values behind them: round the inner ring, and their sums from window to window."""

    def __init__(self, ring: Ring):
        self.ring = ring
        self.far: _Sent | None = None

    def sent(self, gradients: Sequence[Tensor], round_: int, step: int) -> Callable[[], list[Tensor] | None]:
        """Sends those of the step before; what it returns gives the ones that this step adds to, or None where a round
        begins.
        """
        near = self.ring.passed_on(*gradients) if self.ring.window > 1 else None
        if step:
            return near.received

        def settled() -> None:
            self._settle(gradients if near is None else near.received())

        return settled

    def _settle(self, gradients: Sequence[Tensor]) -> None:
        """A round's gradients are where its keys began it: they join the sum of the rounds before, which goes on."""
        if self.far is not None:
            gradients = [g + before for g, before in zip(gradients, self.far.received())]
        self.far = self.ring.passed_on(*gradients, far=True)

    def arrived(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of this rank's own keys, from all ranks."""
        if self.ring.window > 1:
            gradients = self.ring.passed_on(*gradients).received()
        if self.ring.rounds > 1:
            self._settle(gradients)
            gradients = self.far.received()
        return gradients
