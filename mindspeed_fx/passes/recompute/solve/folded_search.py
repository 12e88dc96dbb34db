"""Layers that repeat are planned once: the search of the folded step, with every plan it hands out evaluated as the
whole step.

The certificate holds for all choices of the whole step, whatever its layers do. Take a choice x_1 ... x_n of the n
layers in the middle, and let the layer that stands for them do what they do on average. What linear functions say of
prices, times and memory is then the same, if moments within these layers have no price. A minimum cut is a linear
program, so averages are among what it minimizes over; all it asks of them holds layer by layer and so on average, but
for what
an operation reads of the layer before: of the n - 1 layers that have one before them in the middle the average holds up
to 1 / n. The flow over such an edge, divided by n, is what that can cost. What the first of the n reads of the layer
before them, and what is read of the last, is not asked at all.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Callable, Sequence

from mindspeed_fx.passes.recompute.problem.contract import contract
from mindspeed_fx.passes.recompute.problem.folded_layers import Folded, fold, groups
from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem
from mindspeed_fx.passes.recompute.problem.repeated_layers import repeats
from mindspeed_fx.passes.recompute.solve.budget_search import MOST_WALK, Search, _rank, _size
from mindspeed_fx.passes.recompute.solve.lower_bound import Moments, least_seconds, moments
from mindspeed_fx.passes.recompute.solve.max_flow import ENDLESS
from mindspeed_fx.passes.recompute.solve.min_cut import UNIT, Cuts
from mindspeed_fx.passes.recompute.solve.row_generation import optimum

ALONE = 2
"""Layers at each end whose moments the certificate prices."""

LARGE = 700
"""Nodes, views not counted, from which on layers are folded; with fewer every layer is planned by itself, in less than
half a second.
"""

SPANS = (1, 2, 3)
"""Layers that are recomputed at once: so many count as one layer of a folded step."""

GROUPS = 3
"""Groups of such joined layers."""

TAKEN = 1
"""Folded steps, of those with the fastest plans so far, in which better ones are looked for."""

TRIES = 2
"""Limits tried for one of the whole step, where the folded step took less than that."""

NEAR = 0.02
"""How far the peak of a folded step may be from that of the whole at saving everything before it is not used."""

WALKS = 8
"""Walks of threshold accepting before the integer programs, which have less to look for the faster the plan is that is
known.
"""

FEW = 400
"""Values up to which integer programs are tried at all."""

NODES = 2000
"""Nodes of the search tree of one such program."""

LOW = 0.1
"""How far the smallest peak of a folded step may be from the smallest of all before no smaller is looked for there."""


class Layers(Search):
    """Plans of a step, found without its views and folded where its layers repeat.

    Args:
        large: nodes from which on layers are folded.

    Attributes:
        found: the layers; None where too few are alike.
        inner: searches of folded steps, one for each number of layers that may be recomputed at once, or the one of all
            nodes.
    """

    def __init__(self, schedule: RematProblem, unplanned: Sequence[float] | None, large: int = LARGE):
        self.schedule, self._seen, self.inner = schedule, {}, []
        self.small, self._nodes, prices = contract(schedule, unplanned)
        self._small: dict[frozenset[int], Plan | None] = {}
        self.repeats = repeats(self.small, prices) if len(self.small.sources) >= large else None
        for span in SPANS if self.repeats else ():
            if (
                (result := self.repeats.joined(span))
                and result.count >= 2 * GROUPS
                and (folded := fold(self.small, result, groups(result.count, GROUPS if span > 1 else None), prices))
            ):
                self._add(Search(*folded, None if span == 1 else [folded[0].edges]))
        if not self.inner:
            self.repeats, self.inner = None, [Search(self.small, prices)]

    def _add(self, search: Search) -> None:
        whole = search.hull and self._reduced(search, search.richest)
        if whole and abs(whole.bytes - search.richest.bytes) <= NEAR * whole.bytes:
            search.whole = lambda plan: self._reduced(search, plan)
            self.inner.append(search)

    def _reduced(self, search: Search, plan: Plan) -> Plan | None:
        """A plan of a folded step as one of the whole without its views."""
        saved = search.schedule.expand(plan.saved)
        if saved not in self._small:
            self._small[saved] = self.small.evaluate(saved)
        return self._small[saved]

    def whole(self, plan: Plan) -> Plan | None:
        """A plan of the step without its views as one of the whole."""
        return self._plan(self._nodes[v] for v in plan.saved)

    @cached_property
    def cuts(self) -> Cuts:
        return Cuts(self.schedule)

    @property
    def empty(self) -> bool:
        return self.inner[0].empty

    def points(self) -> list[tuple[float, int]]:
        results = []
        for seconds, bytes_ in sorted(p for search in self.inner for p in search.points()):
            if not results or bytes_ < results[-1][1]:
                results.append((seconds, bytes_))
        return results

    def frontier(self) -> list[Plan]:
        for search in self.inner:
            for p in search.frontier():
                self.whole(self._reduced(search, p))
        return super().frontier()

    @cached_property
    def hull(self) -> list[Plan]:
        return [self.whole(self._reduced(self.inner[0], p)) for p in self.inner[0].hull]

    @cached_property
    def richest(self) -> Plan:
        return self.whole(self._reduced(self.inner[0], self.inner[0].richest))

    @cached_property
    def least(self) -> Plan:
        low = min(search.smallest.bytes for search in self.inner)
        near = self._sharing([search for search in self.inner if search.smallest.bytes <= low * (1 + LOW)])
        results = [self._reduced(search, search.least) or self._reduced(search, search.smallest) for search in near]
        # With values that the user moves or saves, what the step without its views can make again the whole may not be
        # able to.
        return next(
            (w for p in sorted((p for p in (*results, *self._small.values()) if p), key=_size) if (w := self.whole(p))),
            self.richest,
        )

    def best(self, limit: int) -> Plan | None:
        if self.richest.bytes <= limit:
            return self.richest
        order = sorted(
            self.inner,
            key=lambda search: (p.seconds if (p := search._fastest(limit)) else math.inf, search.smallest.bytes),
        )
        results = [self._best(search, limit) for search in self._sharing(order[:TAKEN])]
        whole = next((w for p in sorted((p for p in results if p), key=_rank) if (w := self.whole(p))), None)
        return min((p for p in (whole, self.least) if p and p.bytes <= limit), key=_rank, default=None)

    def _sharing(self, searches: list[Search]) -> list[Search]:
        """``searches``, of which each may do its part of the work."""
        for search in searches:
            search.part = 1 / len(searches)
        return searches

    def _best(self, search: Search, limit: int) -> Plan | None:
        """The best plan of one folded step, of the whole step without its views."""
        room = limit
        for _ in range(TRIES):
            plan = search.best(room)
            plan = plan and self._reduced(search, plan)
            if plan is None or plan.bytes <= limit:
                return plan
            room -= max(1, plan.bytes - limit)
        return None

    def certified(
        self, limit: int, plan: Plan, nodes: int = NODES, clock: float | None = None
    ) -> tuple[Plan, float | None]:
        """(``plan``, or a faster one of at most ``limit`` bytes, a bound of the time of all of them), by further walks
        and by integer programs (:mod:`mindspeed_fx.passes.recompute.solve.integer_program`); for steps of up to
        :data:`FEW` values, else None in place of the bound.
        """
        if len(self.small.values) > FEW:
            return plan, None
        number = {v: n for n, v in enumerate(self._nodes)}
        known = self.small.evaluate(number[v] for v in plan.saved)
        if self.repeats is None:  # the one search is of this step
            for seed in range(1, WALKS + 1):
                known = min(known, self.inner[0].walk(known, limit, MOST_WALK, seed), key=_rank)
        result = optimum(self.small, limit, nodes, clock, known)
        better = [self.whole(p) for p in (known, result.plan) if p]
        return min((p for p in (plan, *better) if p and p.bytes <= limit), key=_rank), result.seconds

    def bound(self, limit: int, rounds: int = 40) -> float | None:
        if self.repeats is None:
            return least_seconds(self.small, self.inner[0].cuts, limit, rounds)
        result, cuts, rows = self._certain
        return least_seconds(result, cuts, limit, rounds, rows)

    @cached_property
    def _certain(self) -> tuple[Folded, Cuts, Moments]:
        middle = self.repeats.count - 2 * ALONE
        result, _ = fold(self.small, self.repeats, [*[1] * ALONE, middle, *[1] * ALONE])
        return result, AverageCuts(result), _moments(result)


class AverageCuts(Cuts):
    """Minimum cuts over the averages of the layers in the middle; their sums are lower bounds for the whole step."""

    def _edges(self, again: dict[int, int]) -> None:
        s, self._around = self.schedule, []
        many = lambda v: s.group[v] if s.weight[v] > 1 else -1  # noqa: E731
        for v in self.values:
            for a in {s.root[a] for a in s.sources[v]}:
                if a in again and (many(a) == many(v) or many(v) >= 0 and s.group[a] < 0):
                    self._network.add(again[a] + 1, again[v], ENDLESS)
            if many(v) >= 0:
                for a in {s.root[a] for a in s.below.get(v, ())}:
                    if a in again:
                        self._around.append((self._network.add(again[a] + 1, again[v], ENDLESS), s.weight[v]))

    def cheapest(self, price: Callable[[int], float]) -> tuple[frozenset[int], float]:
        saved, total = super().cheapest(price)
        room = self._network.room
        return saved, total - sum(-(-room[e ^ 1] // n) for e, n in self._around) * UNIT


def _moments(s: Folded) -> Moments:
    """:func:`mindspeed_fx.passes.recompute.solve.lower_bound.moments` of the whole step, at the moments outside the
    middle.
    """
    result, count = moments(s), len(s.layers)
    runs = s.computing(s.returned)
    order = (*(i for i in s.forward if runs[i]), *s.backward)
    cut = len(order) - len(s.backward)
    done = [0] * (2 * count + 2)
    for k in range(1, count + 2):
        done[count + k] = s.returns * sum(n - 1 for n in s.layers[max(0, count - k + 1) :])
    middle = [2 * count - g for g, n in enumerate(s.layers) if n > 1]
    certain = [c + done[s.place[i]] * (t >= cut) for t, (c, i) in enumerate(zip(result.certain, order))]
    # Where the layers below the middle run, what the last of its layers holds may be all there is.
    over = next((t for t in range(cut, len(order)) if s.place[order[t]] > max(middle)), len(order)) - 1
    lives = {
        v: (w * s.weight[v], first, last if s.weight[v] == 1 else min(last, over))
        for v, (w, first, last) in result.lives.items()
    }
    priced = [t for t, i in enumerate(order) if (s.place[i] not in middle if t >= cut else s.weight[i] == 1)]
    return Moments(certain, lives, result.parts, priced)
