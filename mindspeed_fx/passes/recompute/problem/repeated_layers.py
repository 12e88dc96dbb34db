"""Layers that repeat, found in the numbers of a step: the same sizes, times and reads, one period later.

Names of modules play no part. A stretch of the forward repeats with a period of P nodes when each node has the colour
of the one P before (its bytes, seconds, and whether it may be saved, is needed, returned, ...) and reads what that one
reads, P nodes on, or the very same value from before the stretch (a mask, tables of rotary positions). What the graph
is given is read by anyone: it costs nothing. The rest of the step repeats with a period of Q in the same way, each
period reading the forward one period earlier.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Callable, Sequence

from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem

FEWEST = 6
"""Periods that are worth recognizing."""

CANDIDATES = 4
"""Periods tried: the most common distances between nodes of one colour."""

GIVEN = -1


@dataclass(frozen=True)
class Repeats:
    """``count`` layers: layer k fills nodes ``first`` + k * ``period`` on in the forward, and its gradients, whose
    first node reads the layer first of all, nodes ``last`` - k * ``stride`` on."""

    first: int
    period: int
    count: int
    last: int
    stride: int

    def joined(self, span: int) -> Repeats:
        """The same with every ``span`` layers as one; those that are over at the beginning are none of them."""
        count, over = self.count // span, self.count % span
        return Repeats(
            self.first + over * self.period,
            span * self.period,
            count,
            self.last - (over + span - 1) * self.stride,
            span * self.stride,
        )


def repeats(schedule: RematProblem, unplanned: Sequence[float] | None = None) -> Repeats | None:
    """The longest run of layers that repeat; None when there are fewer than :data:`FEWEST`."""
    s = schedule
    turn = next((i for i in s.backward if s.sources[i]), len(s.sources))
    reads = [
        tuple(
            GIVEN if s.is_input[s.root[a]] and not s.saved_bytes[a] else a for a in (*row, s.root[i], s.maker.get(i, i))
        )
        for i, row in enumerate(s.sources)
    ]
    colours = _colours(s, unplanned, reads)
    best: Repeats | None = None
    for period in _distances(colours, 0, turn):
        first, end = _stretch(colours, reads, range(0, turn), period, lambda a, p=period: p, 0)
        if (end - first) // period < FEWEST or best and best.count * best.period >= end - first:
            continue
        for stride in _distances(colours, turn, len(colours)):
            begin, stop = _stretch(
                colours,
                reads,
                range(turn, len(colours)),
                stride,
                lambda a, p=period, q=stride: q if a >= turn else -p,
                first,
            )
            if (stop - begin) // stride >= FEWEST and (
                result := _align_layers(s, reads, first, end, period, turn, begin, stop, stride)
            ):
                if best is None or result.count * result.period > best.count * best.period:
                    best = result
                break
    return best


def _colours(s: RematProblem, unplanned: Sequence[float] | None, reads: list[tuple[int, ...]]) -> list[int]:
    """One number for all nodes that are alike, their sources' sources included, wherever they stand."""
    sets = [set(x) for x in (s.needed, s.returned, s.gradients, s.backward)]
    names: dict[object, int] = {}
    rows = zip(
        s.size,
        s.saved_bytes,
        s.seconds,
        s.savable,
        s.must_recompute,
        s.is_input,
        s.workspace,
        s.save_seconds,
        s.prepares,
        s.run_seconds,
        unplanned or s.seconds,
    )
    own = [names.setdefault((*row, len(reads[i]), *(i in x for x in sets)), len(names)) for i, row in enumerate(rows)]
    results = own
    for _ in range(2):
        names = {}
        results = [
            names.setdefault((results[i], *(GIVEN if a == GIVEN else results[a] for a in row)), len(names))
            for i, row in enumerate(reads)
        ]
    return results


def _distances(colours: list[int], start: int, stop: int) -> list[int]:
    """The most common distances between neighbours of one colour."""
    last: dict[int, int] = {}
    apart: dict[int, Counter[int]] = {}
    for i in range(start, stop):
        if (before := last.get(colours[i])) is not None:
            apart.setdefault(colours[i], Counter())[i - before] += 1
        last[colours[i]] = i
    votes: Counter[int] = Counter()
    for distances in apart.values():
        ((distance, times),) = distances.most_common(1)
        if times >= FEWEST - 1 and 2 * times > sum(distances.values()):
            votes[distance] += times
    return [d for d, _ in sorted(votes.items(), key=lambda v: (-v[1], v[0]))[:CANDIDATES]]


def _stretch(
    colours: list[int],
    reads: list[tuple[int, ...]],
    where: range,
    period: int,
    moved: Callable[[int], int],
    before: int,
) -> tuple[int, int]:
    """The longest (first node, node behind the last) in ``where`` in which each node is like the one ``period`` before.

    Args:
        moved: by how much what a node reads lies further on than what the one before reads.
        before: what both read alike must lie before this, or in ``where`` before the stretch.
    """
    best, begin = (where.start, where.start), where.start
    for i in range(where.start, where.stop - period + 1):
        alike, fixed = i < where.stop - period and colours[i] == colours[i + period], -1
        if alike:
            for a, b in zip(reads[i], reads[i + period]):
                if a == b:
                    if a >= where.start:
                        fixed = max(fixed, a)
                    elif a >= before:
                        alike = False
                        break
                elif a == GIVEN or b == GIVEN or b - a != moved(a):
                    alike = False
                    break
        if not alike or fixed >= begin:
            if i > begin and i + period - begin > best[1] - best[0]:
                best = (begin, i + period)
            begin = fixed + 1 if alike else i + 1
    return best


def _align_layers(
    s: RematProblem,
    reads: list[tuple[int, ...]],
    first: int,
    end: int,
    period: int,
    turn: int,
    begin: int,
    stop: int,
    stride: int,
) -> Repeats | None:
    """Layers cut where the fewest bytes cross, each with the part of the backward that begins with its first reader
    there.
    """
    last = {s.root[a]: i for i in range(first, end) for a in reads[i] if a != GIVEN}
    edge = end - 2 * period  # of a period that is like all others
    crossing = [0] * (period + 1)
    for a in range(max(first, edge - period), edge + period):
        if s.root[a] == a and a in last:
            for t in range(max(a + 1, edge), min(last[a], edge + period - 1) + 1):
                crossing[t - edge] += s.saved_bytes[a] if s.savable[a] else 1 << 60  # between a call and its results
    narrow = min(range(period), key=lambda k: (crossing[k], -k))
    first += (edge + narrow - first) % period
    count = (end - first) // period
    readers = [len(reads)] * count
    for i in range(len(reads) - 1, turn - 1, -1):
        for a in reads[i]:
            if first <= a < first + count * period:
                readers[(a - first) // period] = i
    run: list[int] = []
    best: list[int] = []
    for k in range(count):
        if not (begin <= readers[k] and readers[k] + stride <= stop):
            run = []
        else:
            run = [*run, k] if run and readers[run[-1]] - readers[k] == stride else [k]
        best = run if len(run) > len(best) else best
    return (
        Repeats(first + best[0] * period, period, len(best), readers[best[0]], stride) if len(best) >= FEWEST else None
    )
