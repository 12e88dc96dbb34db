"""A step in which one layer stands for many that are alike, so that they are planned once.

Of the layers that repeat (:mod:`mindspeed_fx.passes.recompute.problem.repeated_layers`) a few are kept, each for a
group of neighbours that all do as it does; the others are cut out, and what reads them reads the same value of the kept
layer next to them. Times and prices of a kept layer count as often as its group has layers. Memory, for a group of 1 +
M layers whose layer keeps m bytes between forward and backward and returns g bytes of gradients:

- M * m more from the forward of the group to the end of its backward in the kept layers above,
- M * max(m, g) more while the backward of the kept layer runs (the group's first layer of the backward has all m, its
  last all g),
- M * g more from there on.

This is the peak of the whole step when a layer's backward makes nothing again but of its own and of its neighbour's
layer, as long as neighbours in a group do alike. A layer that would be recomputed from the layer before, and that from
the one before it, is counted with everything that the group recomputes at once. Whatever is chosen here is evaluated
once more as the whole step (:class:`mindspeed_fx.passes.recompute.solve.budget_search.Search` is given both).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Iterable, Sequence

import numpy as np

from mindspeed_fx.passes.recompute.problem.remat_problem import RematProblem
from mindspeed_fx.passes.recompute.problem.repeated_layers import Repeats


@dataclass
class Folded(RematProblem):
    """A schedule of the kept layers; see :func:`fold`."""

    layers: list[int] = field(default_factory=list)
    """How many layers each group has, in the order of the forward."""
    group: list[int] = field(default_factory=list)
    """Of each node of the forward the group it belongs to; -1 before and behind the layers."""
    place: list[int] = field(default_factory=list)
    """Of each node how far the step is: k in the forward when k groups have begun, ``len(layers)`` + k in the backward
    when k have; one more behind them.
    """
    origin: list[int] = field(default_factory=list)
    """Of each node that of the whole step which it stands for, the first of its group."""
    period: int = 0
    """From there to that of the group's next layer."""
    below: dict[int, list[int]] = field(default_factory=dict)
    """Node -> what a layer that stands on a copy of its own group reads of that copy."""
    returns: int = 0
    """Bytes of gradients that the backward of one layer returns."""

    @cached_property
    def edges(self) -> frozenset[int]:
        """What crosses from layer to layer."""
        return frozenset(self.root[a] for reads in self.below.values() for a in reads if self.savable[self.root[a]])

    @cached_property
    def weight(self) -> list[int]:
        """How many nodes of the whole step a node stands for."""
        return [1 if g < 0 else self.layers[g] for g in self.group]

    @cached_property
    def held(self) -> list[int]:
        return [w * b for w, b in zip(self.weight, self.saved_bytes)]

    def parts(self, values: Sequence[int]) -> list[set[int]]:
        """The values of each group, in their order."""
        results: dict[int, set[int]] = {}
        for v in values:
            results.setdefault(self.group[v], set()).add(v)
        return list(results.values())

    def reads(self, i: int) -> set[int]:
        """As if every layer stood on a copy of its own group, so that neighbours find the same."""
        if (g := self.group[i]) < 0:
            return super().reads(i)
        alike = self.sources[i + self._starts[1] - self._starts[0]] if g == 0 else self.sources[i]
        return {self.root[a] for a in self.sources[i] if self.group[a] == g or self.group[a] < 0 and a in alike} | {
            self.root[a] for a in self.below.get(i, ())
        }

    @cached_property
    def _starts(self) -> list[int]:
        return [self.group.index(g) for g in range(len(self.layers))]

    def expand(self, saved: Iterable[int]) -> frozenset[int]:
        """The choice of the whole step."""
        return frozenset(self.origin[v] + k * self.period for v in saved for k in range(self.weight[v]))

    def _alive(self, saved, first, second, moves=()):
        alive = super()._alive(saved, first, second, moves)
        more, count, cut = self._more(saved), len(self.layers), len(first)
        opens, closes, result = self._places
        ends = [*(bisect.bisect_left(first, i) for i in opens), cut]  # of each place, in the forward
        for k in range(1, count + 1):
            if more[k] and ends[k - 1] < ends[k]:
                alive[ends[k - 1] : ends[k]] += more[k]
        turns, at = (
            [cut],
            cut,
        )  # where each place of the backward begins; what is recomputed counts for the node that it is made for
        for i in closes:
            at = second.index(i, at - cut) + cut + 1 if i >= 0 else at
            turns.append(at)
        for k, (low, high) in enumerate(zip(turns, [*turns[1:], len(alive)]), count):
            if more[k] and low < high:
                alive[low:high] += more[k]
        run = np.array(second, dtype=np.int64)
        early = np.flatnonzero(
            result[run] > np.searchsorted(turns, np.arange(cut, cut + len(second)), "right") - 1 + count
        )
        crossing = {second[t]: t + cut for t in early.tolist()}  # recomputed for a layer above
        for g, extra in self._chains(crossing, saved, second) if crossing else ():
            begin, above = min(t for i, t in crossing.items() if self.group[i] == g), self._above[g]
            until = second.index(above, begin - cut) + cut if above >= 0 else len(alive)
            alive[begin:until] += extra
        return alive

    @cached_property
    def _places(self) -> tuple[list[int], list[int], Any]:
        """The first node of the forward of each place from 1 on; the last of the backward of each place but the last,
        -1 where it has none; of each node the place before which it is recomputed too early, -1 for the backward's own.
        """
        count, forward = len(self.layers), self._forward_set
        opens = [next((i for i in self.forward if self.place[i] >= k), len(self.sources)) for k in range(1, count + 1)]
        last = {max(self.place[i], count): i for i in self.backward if not self.is_input[i]}
        closes = [last.get(k, -1) for k in range(count, 2 * count + 1)]
        results = [
            -1 if i not in forward else 2 * count - g if g >= 0 and self.layers[g] > 1 else 0
            for i, g in enumerate(self.group)
        ]
        return opens, closes, np.array(results)

    @cached_property
    def _layer_reads(self) -> list[list[tuple[int, int]]]:
        """What each node reads of its own layer, and of the one before it: (value, how many layers below)."""
        own = lambda i: [(self.root[a], 0) for a in self.sources[i] if self.group[a] == self.group[i]]  # noqa: E731
        return [
            [*own(i), *((self.root[a], 1) for a in self.below.get(i, ()))] if g >= 0 else []
            for i, g in enumerate(self.group)
        ]

    @cached_property
    def _above(self) -> list[int]:
        """Of each group the first node of the backward behind the group's own; -1 where there is none."""
        count = len(self.layers)
        return [
            next((i for i in self.backward if not self.is_input[i] and self.place[i] > 2 * count - g), -1)
            for g in range(count)
        ]

    def _more(self, saved: Iterable[int]) -> list[int]:
        """Bytes of the layers that were cut out, by place."""
        kept, count = {self.root[i] for i in (*saved, *self.returned)}, len(self.layers)
        between = [0] * count
        for v in kept:
            if self.group[v] >= 0:
                between[self.group[v]] += self.saved_bytes[v]
        ghosts = [(n - 1) * m for n, m in zip(self.layers, between)]
        after = [(n - 1) * self.returns for n in self.layers]
        more = [sum(ghosts[:k]) for k in range(count + 1)]
        for k in range(1, count + 1):  # the backward of group count - k
            g = count - k
            more.append(sum(ghosts[:g]) + max(ghosts[g], after[g]) + sum(after[g + 1 :]))
        return [*more, sum(after)]

    def _chains(self, crossing: Iterable[int], saved: frozenset[int], second: list[int]) -> list[tuple[int, int]]:
        """(group, bytes) of groups whose layers are recomputed each from the one before: of each layer what the next is
        made from, all at once.
        """
        kept, results, result = {self.root[i] for i in (*saved, *self.returned)}, [], set(second)
        for g in {self.group[i] for i in crossing}:
            todo = [(i, 0) for i in crossing if self.group[i] == g]
            depth = dict(todo)
            while todo:
                i, far = todo.pop()
                for a, more in self._layer_reads[i]:
                    deep = far + more
                    if a not in kept and depth.get(a, -1) < deep <= 2:
                        depth[a] = deep
                        todo.append((a, deep))
            if max(depth.values()) >= 2:
                results.append(
                    (
                        g,
                        (self.layers[g] - 1)
                        * sum(
                            self.size[v] for i, deep in depth.items() if deep for v in self._filled[i] if v in result
                        ),
                    )
                )
        return results


def groups(count: int, number: int | None = None) -> list[int]:
    """Sizes of the groups of ``count`` layers, in the order of the forward: nearly every number is the sum of some,
    with as many groups as that takes.
    """
    sizes, remaining = [], count
    number = number or max(4, (count - 1).bit_length())
    for k in range(number - 1):
        sizes.append(max(1, min(2**k, remaining // (number - k))))
        remaining -= sizes[-1]
    return [remaining, *reversed(sizes)]


class _KeptLayers:
    """The nodes of a step that stay when all but ``keep`` of its repeated layers are cut out, and what they read and
    stand for then. Node 0 of the folded step stands for all that the graph is given.
    """

    def __init__(self, schedule: RematProblem, result: Repeats, keep: int):
        self.schedule, self.repeats, self.save_seconds = schedule, result, keep
        s, gone = schedule, result.count - keep
        self.gone = gone
        self.low = keep // 2
        """Kept layers below what is cut out."""
        self.forward, self.span = result.first + self.low * result.period, gone * result.period
        """The first node that is cut out of the forward, and how many are; of the backward likewise."""
        self.backward, self.back = result.last - (self.low + gone - 1) * result.stride, gone * result.stride
        x, y = self.forward, self.backward
        self.nodes = [
            i
            for i in range(len(s.sources))
            if not (x <= i < x + self.span or y <= i < y + self.back) and not (s.is_input[i] and not s.saved_bytes[i])
        ]
        self.number = {i: n for n, i in enumerate(self.nodes, 1)}
        self.odd = False
        """Whether something reads many of the layers at once."""

    @cached_property
    def turn(self) -> int:
        """The first node of the backward."""
        return min(i for i in self.schedule.backward if self.schedule.sources[i])

    def glue(self, i: int, a: int) -> int:
        """What a kept node reads in place of ``a``."""
        s, period, stride = self.schedule, self.repeats.period, self.repeats.stride
        x, y, span, back = self.forward, self.backward, self.span, self.back
        if s.is_input[s.root[a]] and not s.saved_bytes[a]:
            return 0
        if x <= a < x + span:
            over = x + span <= i < y
            self.odd |= a < x + span - period if over else a >= x + period
            a += -span if over else span
        elif y <= a < y + back:
            self.odd |= a < y + back - stride
            a -= back
        self.odd |= a not in self.number  # what is read so lies outside of the layers (recurrent steps inside of one)
        return self.number.get(a, 0)

    def group_of(self, i: int) -> int:
        """The kept layer of a kept node of the forward; -1 outside."""
        k = self._forward_layer(i)
        return k if i >= self.repeats.first and 0 <= k < self.save_seconds and i < self.turn else -1

    def place_of(self, i: int) -> int:
        """How far the step is at a kept node, see :attr:`Folded.place`."""
        keep, result = self.save_seconds, self.repeats
        if i < self.turn:
            return max(0, min(keep, self._forward_layer(i) + 1))
        first = result.last - (result.count - 1) * result.stride
        k = (i - first - (self.back if i >= self.backward + self.back else 0)) // result.stride
        return max(keep, min(2 * keep + 1, keep + 1 + k))

    def origins(self, group: Sequence[int], layers: Sequence[int]) -> list[int]:
        """Of each node of the folded step that of the whole step which it stands for."""
        first, period = self.repeats.first, self.repeats.period
        starts = [0]
        for n in layers:
            starts.append(starts[-1] + n)
        return [0] + [
            i if g < 0 else first + starts[g] * period + self._forward_offset(i) % period
            for i, g in zip(self.nodes, group[1:])
        ]

    def below(self) -> dict[int, list[int]]:
        """See :attr:`Folded.below`."""
        s, first, period = self.schedule, self.repeats.first, self.repeats.period
        results: dict[int, list[int]] = {}
        for o in range(period):
            phases = [a - first for a in s.sources[first + period + o] if first <= a < first + period]
            for g in range(self.save_seconds) if phases else ():
                start = first + (g if g < self.low else g + self.gone) * period
                results[self.number[start + o]] = [self.number[start + p] for p in phases]
        return results

    def _forward_offset(self, i: int) -> int:
        return i - self.repeats.first - (self.span if i >= self.forward + self.span else 0)

    def _forward_layer(self, i: int) -> int:
        return self._forward_offset(i) // self.repeats.period


def fold(
    schedule: RematProblem, result: Repeats, layers: Sequence[int], unplanned: Sequence[float] | None = None
) -> tuple[Folded, list[float] | None] | None:
    """The step with one layer for each group, and ``unplanned`` of it; None when something reads many of the layers at
    once.

    Args:
        layers: how many layers each group has; their sum is that of the layers found.
    """
    s, kept = schedule, _KeptLayers(schedule, result, len(layers))
    nodes, number = kept.nodes, kept.number
    sources = [(), *(tuple(dict.fromkeys(kept.glue(i, a) for a in s.sources[i])) for i in nodes)]
    root = [0, *(kept.glue(i, s.root[i]) for i in nodes)]
    if kept.odd:
        return None
    group = [-1, *(kept.group_of(i) for i in nodes)]
    weight = [1 if g < 0 else layers[g] for g in group]

    def pick(row: Sequence[Any], zero: Any) -> list:
        return [zero, *(row[i] for i in nodes)]

    def multiply(row: Sequence[float]) -> list[float]:
        """Each number as often as its group has layers."""
        return [w * v if v else v for w, v in zip(weight, pick(row, 0.0))]

    def renumber(row: Iterable[int]) -> list[int]:
        return [number[i] for i in row if i in number]

    ends = {s.root[i] for i in s.gradients}
    output = Folded(
        sources=sources,
        root=root,
        size=pick(s.size, 0),
        saved_bytes=pick(s.saved_bytes, 0),
        seconds=multiply(s.seconds),
        savable=pick(s.savable, False),
        must_recompute=pick(s.must_recompute, False),
        is_input=pick(s.is_input, True),
        backward=renumber(s.backward),
        needed=renumber(s.needed),
        returned=renumber(s.returned),
        gradients=renumber(s.gradients),
        maker={number[a]: kept.glue(a, b) for a, b in s.maker.items() if a in number},
        workspace=pick(s.workspace, 0),
        save_seconds=multiply(s.save_seconds),
        prepares=pick(s.prepares, False),
        run_seconds=pick(s.run_seconds, 0.0),
        layers=list(layers),
        group=group,
        place=[0, *(kept.place_of(i) for i in nodes)],
        origin=kept.origins(group, layers),
        period=result.period,
        below=kept.below(),
        returns=sum(
            s.saved_bytes[v] for v in range(result.last, result.last + result.stride) if v in ends and s.root[v] == v
        ),
    )
    return output, None if unplanned is None else multiply(unplanned)
