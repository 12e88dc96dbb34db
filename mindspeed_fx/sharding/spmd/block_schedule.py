"""Which rank computes which block of scores, and when, for a mask that leaves some blocks of queries by keys empty.

The sequence is cut into blocks, as many on every rank. A rank computes the blocks of queries that it is given, whole
rows of scores; the keys that they need come from the ranks that hold them, in stages, and what is empty is neither sent
nor computed. Every rank computes as many pairs (block of queries, block of keys) in every stage and sends and receives
as many blocks, so that the programs of all ranks differ in numbers alone; where they would not, fillers make them.

Source: the assignment is the one of MagiAttention's dispatch (equal numbers of blocks, the largest work smallest),
found by exchange of blocks from where they are; MindSpeed's adaptive context parallelism groups rows by clustering
instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Sequence

PER_RANK = (1, 2, 4, 8, 16)
"""Blocks per rank that are tried."""

OVERHEAD = 64
"""A pair of blocks of c rows is taken to cost as much as (c + OVERHEAD)^2 scores: products of few rows are slow."""

NEAR = 1.02
"""An assignment with this imbalance that moves few blocks is preferred to a better one that moves most."""

EVEN = 1.05
"""Imbalance up to which the number of blocks is chosen by price alone."""

Needed = tuple[tuple[bool, ...], ...]
"""By block of queries and block of keys: whether any score of the pair counts."""


@dataclass(frozen=True)
class Stage:
    """What happens between two messages; everything by rank, each list of one length on all ranks."""

    messages: tuple[tuple[int, ...], ...]
    """Own blocks of keys (0 is the first one that the rank holds) in the order of the ranks they go to."""
    counts: tuple[tuple[int, ...], ...]
    """[from][to]: how many of them."""
    pairs: tuple[tuple[tuple[int, int, int], ...], ...]
    """(place among the rank's blocks of queries, place among its own and then the received blocks of keys, block of
    keys); the last is -1 for a filler."""

    @property
    def received(self) -> int:
        """Blocks that every rank receives."""
        return len(self.messages[0])


@dataclass(frozen=True)
class BlockSchedule:
    """Who computes what, in which order."""

    per_rank: int
    queries: tuple[tuple[int, ...], ...]
    """By rank: its blocks of queries, ascending."""
    stages: tuple[Stage, ...]
    work: tuple[int, ...]
    """By rank: pairs that count."""

    @property
    def pairs(self) -> int:
        """Pairs that every rank computes, fillers included."""
        return sum(len(s.pairs[0]) for s in self.stages)

    @property
    def imbalance(self) -> float:
        """Largest over mean number of pairs; 1 is ideal."""
        return max(self.work) * len(self.work) / sum(self.work)

    @property
    def moved(self) -> bool:
        """Whether any rank computes queries that it does not hold."""
        return any(q != r * self.per_rank + i for r, own in enumerate(self.queries) for i, q in enumerate(own))


def needed_blocks(blocks: int, rows: int, causal: bool, window: int) -> Needed:
    """What causal attention with a window (0: none) needs, in blocks of ``rows`` queries by as many keys."""
    return tuple(
        tuple(
            not causal or (j <= i and not (window and i > j and (i - j - 1) * rows + 1 >= window))
            for j in range(blocks)
        )
        for i in range(blocks)
    )


def coarse(fine: Needed, factor: int) -> Needed:
    """``fine`` in blocks ``factor`` times as large."""
    n = len(fine) // factor
    lines = [[any(fine[i][j * factor : (j + 1) * factor]) for j in range(n)] for i in range(len(fine))]
    return tuple(
        tuple(any(lines[k][j] for k in range(i * factor, (i + 1) * factor)) for j in range(n)) for i in range(n)
    )


def best(fine: Needed, ranks: int, rows: int) -> BlockSchedule:
    """The schedule with the number of blocks per rank at which the ranks are done first, as :data:`OVERHEAD` prices
    pairs.

    Args:
        fine: in blocks of ``rows`` rows, some multiple of ``ranks`` of them.
        rows: of a block of ``fine``.
    """
    most = len(fine) // ranks
    results = [(schedule_blocks(coarse(fine, most // n), ranks), rows * most // n) for n in PER_RANK if most % n == 0]
    return min(results, key=lambda f: (f[0].imbalance > EVEN, f[0].pairs * (f[1] + OVERHEAD) ** 2))[0]


@functools.lru_cache(64)
def schedule_blocks(need: Needed, ranks: int) -> BlockSchedule:
    """The schedule for these pairs of blocks."""
    per_rank = len(need) // ranks
    work = [max(1, sum(row)) for row in need]
    owners = assign_blocks(work, ranks)
    queries = tuple(tuple(i for i in range(len(need)) if owners[i] == r) for r in range(ranks))
    lists = []
    for r in range(ranks):
        # From the rank itself backwards: in every stage the ranks ask different others.
        wanted = [
            ((r - j // per_rank) % ranks, j, place)
            for place, i in enumerate(queries[r])
            for j in range(len(need))
            if need[i][j]
        ]
        lists.append([(place, j) for _, j, place in sorted(wanted)])
    most = max(map(len, lists), default=0) or 1
    stages = min(ranks, most)
    local = all(j // per_rank == r for r, pairs in enumerate(lists) for _, j in pairs)
    size = -(-most // (1 if local else stages))
    results = tuple(
        _stage([pairs[at : min(at + size, most)] for pairs in lists], min(size, most - at), per_rank)
        for at in range(0, most, size)
    )
    return BlockSchedule(per_rank, queries, results, tuple(map(len, lists)))


def assign_blocks(work: Sequence[int], ranks: int) -> list[int]:
    """By block: the rank that computes it. Every rank gets as many blocks, and the largest sum of ``work`` is made
    small.
    """
    per_rank = len(work) // ranks
    near = _exchange_blocks([i // per_rank for i in range(len(work))], work, ranks)
    if _imbalance(near, work, ranks) <= NEAR:
        return near
    far, loads, room = [0] * len(work), [0] * ranks, [per_rank] * ranks
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        r = min((r for r in range(ranks) if room[r]), key=lambda r: (loads[r], r != i // per_rank))
        far[i], loads[r], room[r] = r, loads[r] + work[i], room[r] - 1
    return min(near, _exchange_blocks(far, work, ranks), key=lambda owners: _imbalance(owners, work, ranks))


def _imbalance(owners: Sequence[int], work: Sequence[int], ranks: int) -> float:
    loads = [0] * ranks
    for i, r in enumerate(owners):
        loads[r] += work[i]
    return max(loads) * ranks / sum(loads)


def _exchange_blocks(owners: list[int], work: Sequence[int], ranks: int) -> list[int]:
    """``owners`` after the best exchanges of a block of the rank with the most work for one of another, until none
    helps.
    """
    owners, loads = list(owners), [0] * ranks
    for i, r in enumerate(owners):
        loads[r] += work[i]
    mean = sum(loads) / ranks
    while (top := max(loads)) > mean:
        most = loads.index(top)
        mine = {work[i]: i for i in reversed(range(len(work))) if owners[i] == most}
        others = {(owners[i], work[i]): i for i in reversed(range(len(work))) if owners[i] != most}
        result = min(
            ((max(top - w + v, loads[r] + w - v), i, j) for w, i in mine.items() for (r, v), j in others.items()),
            default=(top, 0, 0),
        )
        if result[0] >= top:
            break
        _, i, j = result
        loads[most] += work[j] - work[i]
        loads[owners[j]] += work[i] - work[j]
        owners[i], owners[j] = owners[j], owners[i]
    return owners


def _stage(lists: list[list[tuple[int, int]]], size: int, per_rank: int) -> Stage:
    ranks = len(lists)
    wanted = [sorted({j for _, j in pairs if j // per_rank != r}) for r, pairs in enumerate(lists)]
    flows = [
        [[j % per_rank for j in wanted[to] if j // per_rank == source] for to in range(ranks)]
        for source in range(ranks)
    ]
    sent, received = [sum(map(len, f)) for f in flows], [len(w) for w in wanted]
    degree = max(sent + received)
    for source in range(ranks):  # fillers: a rank that could send more to one that could receive more
        for to in range(ranks):
            extra = min(degree - sent[source], degree - received[to])
            flows[source][to] += [0] * extra
            sent[source], received[to] = sent[source] + extra, received[to] + extra
    slots = []
    for r in range(ranks):
        arrived = [source * per_rank + j for source in range(ranks) for j in flows[source][r]]
        slots.append(
            {j: per_rank + place for place, j in reversed(list(enumerate(arrived)))}
            | {r * per_rank + i: i for i in range(per_rank)}
        )
    pairs = tuple(
        (*((place, slots[r][j], j) for place, j in lists[r]), *[(0, 0, -1)] * (size - len(lists[r])))
        for r in range(ranks)
    )
    return Stage(
        tuple(tuple(j for f in flows[r] for j in f) for r in range(ranks)),
        tuple(tuple(map(len, f)) for f in flows),
        pairs,
    )
