"""A step in which one layer stands for many that are alike, so that they are planned once.

Of the layers that repeat (:mod:`repeats`) a few are kept, each for a group of neighbours that all do as it does; the
others are cut out, and what reads them reads the same value of the kept layer next to them. Times and prices of a kept
layer count as often as its group has layers. Memory, for a group of 1 + M layers whose layer keeps m bytes between
forward and backward and returns g bytes of gradients:

- M * m more from the forward of the group to the end of its backward in the kept layers above,
- M * max(m, g) more while the backward of the kept layer runs (the group's first layer of the backward has all m, its
  last all g),
- M * g more from there on.

This is the peak of the whole step when a layer's backward makes nothing again but of its own and of its neighbour's
layer, as long as neighbours in a group do alike. A layer that would be made again from the layer before, and that from
the one before it, is counted with everything that the group makes again at once. Whatever is chosen here is evaluated
once more as the whole step (:class:`mindspeed_fx.passes.recompute.solve.budget_search.Search` is given both).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Iterable, Sequence

import numpy as np

from mindspeed_fx.passes.recompute.problem.remat_problem import Schedule
from mindspeed_fx.passes.recompute.problem.repeated_layers import Repeats


@dataclass
class Folded(Schedule):
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
        return [w * b for w, b in zip(self.weight, self.full)]

    def parts(self, values: Sequence[int]) -> list[set[int]]:
        """The values of each group, in their order."""
        found: dict[int, set[int]] = {}
        for v in values:
            found.setdefault(self.group[v], set()).add(v)
        return list(found.values())

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

    def _alive(self, saved, first, second, ways=()):
        alive = super()._alive(saved, first, second, ways)
        more, count, cut = self._more(saved), len(self.layers), len(first)
        opens, closes, made = self._places
        ends = [*(bisect.bisect_left(first, i) for i in opens), cut]  # of each place, in the forward
        for k in range(1, count + 1):
            if more[k] and ends[k - 1] < ends[k]:
                alive[ends[k - 1] : ends[k]] += more[k]
        turns, at = (
            [cut],
            cut,
        )  # where each place of the backward begins; what is made again counts for the node that it is made for
        for i in closes:
            at = second.index(i, at - cut) + cut + 1 if i >= 0 else at
            turns.append(at)
        for k, (low, high) in enumerate(zip(turns, [*turns[1:], len(alive)]), count):
            if more[k] and low < high:
                alive[low:high] += more[k]
        run = np.array(second, dtype=np.int64)
        early = np.flatnonzero(
            made[run] > np.searchsorted(turns, np.arange(cut, cut + len(second)), "right") - 1 + count
        )
        crossing = {second[t]: t + cut for t in early.tolist()}  # made again for a layer above
        for g, extra in self._chains(crossing, saved, second) if crossing else ():
            begin, above = min(t for i, t in crossing.items() if self.group[i] == g), self._above[g]
            until = second.index(above, begin - cut) + cut if above >= 0 else len(alive)
            alive[begin:until] += extra
        return alive

    @cached_property
    def _places(self) -> tuple[list[int], list[int], Any]:
        """The first node of the forward of each place from 1 on; the last of the backward of each place but the last,
        -1 where it has none; of each node the place before which it is made again too early, -1 for the backward's own.
        """
        count, forward = len(self.layers), self._forward_set
        opens = [next((i for i in self.forward if self.place[i] >= k), len(self.sources)) for k in range(1, count + 1)]
        last = {max(self.place[i], count): i for i in self.backward if not self.given[i]}
        closes = [last.get(k, -1) for k in range(count, 2 * count + 1)]
        made = [
            -1 if i not in forward else 2 * count - g if g >= 0 and self.layers[g] > 1 else 0
            for i, g in enumerate(self.group)
        ]
        return opens, closes, np.array(made)

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
            next((i for i in self.backward if not self.given[i] and self.place[i] > 2 * count - g), -1)
            for g in range(count)
        ]

    def _more(self, saved: Iterable[int]) -> list[int]:
        """Bytes of the layers that were cut out, by place."""
        kept, count = {self.root[i] for i in (*saved, *self.returned)}, len(self.layers)
        between = [0] * count
        for v in kept:
            if self.group[v] >= 0:
                between[self.group[v]] += self.full[v]
        ghosts = [(n - 1) * m for n, m in zip(self.layers, between)]
        after = [(n - 1) * self.returns for n in self.layers]
        more = [sum(ghosts[:k]) for k in range(count + 1)]
        for k in range(1, count + 1):  # the backward of group count - k
            g = count - k
            more.append(sum(ghosts[:g]) + max(ghosts[g], after[g]) + sum(after[g + 1 :]))
        return [*more, sum(after)]

    def _chains(self, crossing: Iterable[int], saved: frozenset[int], second: list[int]) -> list[tuple[int, int]]:
        """(group, bytes) of groups whose layers are made again each from the one before: of each layer what the next is
        made from, all at once.
        """
        kept, found, made = {self.root[i] for i in (*saved, *self.returned)}, [], set(second)
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
                found.append(
                    (
                        g,
                        (self.layers[g] - 1)
                        * sum(self.size[v] for i, deep in depth.items() if deep for v in self._filled[i] if v in made),
                    )
                )
        return found


def groups(count: int, number: int | None = None) -> list[int]:
    """Sizes of the groups of ``count`` layers, in the order of the forward: nearly every number is the sum of some,
    with as many groups as that takes.
    """
    sizes, left = [], count
    number = number or max(4, (count - 1).bit_length())
    for k in range(number - 1):
        sizes.append(max(1, min(2**k, left // (number - k))))
        left -= sizes[-1]
    return [left, *reversed(sizes)]


def fold(
    schedule: Schedule, found: Repeats, layers: Sequence[int], unplanned: Sequence[float] | None = None
) -> tuple[Folded, list[float] | None] | None:
    """The step with one layer for each group, and ``unplanned`` of it; None when something reads many of the layers at
    once.

    Args:
        layers: how many layers each group has; their sum is that of the layers found.
    """
    s, keep = schedule, len(layers)
    gone = found.count - keep
    first, period, stride = found.first, found.period, found.stride
    low = keep // 2  # kept layers below what is cut out
    x, y = first + low * period, found.last - (low + gone - 1) * stride
    span, back = gone * period, gone * stride
    nodes = [
        i
        for i in range(len(s.sources))
        if not (x <= i < x + span or y <= i < y + back) and not (s.given[i] and not s.full[i])
    ]
    number = {i: n for n, i in enumerate(nodes, 1)}  # 0 stands for all that the graph is given
    odd = False

    def glued(i: int, a: int) -> int:
        """What a kept node reads in place of ``a``."""
        nonlocal odd
        if s.given[s.root[a]] and not s.full[a]:
            return 0
        if x <= a < x + span:
            over = x + span <= i < y
            odd |= a < x + span - period if over else a >= x + period
            a += -span if over else span
        elif y <= a < y + back:
            odd |= a < y + back - stride
            a -= back
        odd |= a not in number  # what is read so lies outside of the layers (recurrent steps inside of one)
        return number.get(a, 0)

    sources = [(), *(tuple(dict.fromkeys(glued(i, a) for a in s.sources[i])) for i in nodes)]
    root = [0, *(glued(i, s.root[i]) for i in nodes)]
    if odd:
        return None
    turn = min(i for i in s.backward if s.sources[i])
    starts = [0]
    for n in layers:
        starts.append(starts[-1] + n)

    def layer(i: int) -> int:
        """The kept layer of a kept node of the forward; -1 outside."""
        k = (i - first - (span if i >= x + span else 0)) // period
        return k if i >= first and 0 <= k < keep and i < turn else -1

    def where(i: int) -> int:
        if i < turn:
            k = (i - first - (span if i >= x + span else 0)) // period
            return max(0, min(keep, k + 1))
        k = (i - found.last + (found.count - 1) * stride - (back if i >= y + back else 0)) // stride
        return max(keep, min(2 * keep + 1, keep + 1 + k))

    group = [-1, *(layer(i) for i in nodes)]
    weight = [1 if g < 0 else layers[g] for g in group]
    pick = lambda row, zero: [zero, *(row[i] for i in nodes)]  # noqa: E731
    times = lambda row: [w * v if v else v for w, v in zip(weight, pick(row, 0.0))]  # noqa: E731
    origin = [0]
    for i, g in zip(nodes, group[1:]):
        origin.append(
            i if g < 0 else first + starts[g] * period + (i - first - (span if i >= x + span else 0)) % period
        )
    window = range(found.last, found.last + stride)
    ends = {s.root[i] for i in s.gradients}
    below: dict[int, list[int]] = {}
    for o in range(period):
        phases = [a - first for a in s.sources[first + period + o] if first <= a < first + period]
        for g in range(keep) if phases else ():
            start = first + (g if g < low else g + gone) * period
            below[number[start + o]] = [number[start + p] for p in phases]
    kept = lambda row: [number[i] for i in row if i in number]  # noqa: E731
    made = Folded(
        sources=sources,
        root=root,
        size=pick(s.size, 0),
        full=pick(s.full, 0),
        seconds=times(s.seconds),
        savable=pick(s.savable, False),
        forced=pick(s.forced, False),
        given=pick(s.given, True),
        backward=kept(s.backward),
        needed=kept(s.needed),
        returned=kept(s.returned),
        gradients=kept(s.gradients),
        maker={number[a]: glued(a, b) for a, b in s.maker.items() if a in number},
        workspace=pick(s.workspace, 0),
        keep=times(s.keep),
        prepares=pick(s.prepares, False),
        takes=pick(s.takes, 0.0),
        layers=list(layers),
        group=group,
        place=[0, *(where(i) for i in nodes)],
        origin=origin,
        period=period,
        below=below,
        returns=sum(s.full[v] for v in window if v in ends and s.root[v] == v),
    )
    return made, None if unplanned is None else times(unplanned)
