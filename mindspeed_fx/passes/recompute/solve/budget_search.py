"""The least time under a limit of the peak.

1. With a price per saved byte the best choice is a minimum cut (:mod:`mindspeed_fx.passes.recompute.solve.min_cut`). A
   rising price walks along the lower hull of time against memory, from saving everything to making everything again.
2. The same with what crosses narrow places of the forward kept for nothing
   (:mod:`mindspeed_fx.passes.recompute.problem.segments`), which makes the peak of a deep model small.
3. From the fastest of these that fits, threshold accepting
   (:mod:`mindspeed_fx.passes.recompute.solve.threshold_accepting`) saves, recomputes and exchanges single values, also
   through plans that do not fit. Work is counted in plans tried, not in time, so that every rank finds the same plan.

All peaks are those of the simulated step, so a plan that fits in the model fits in the model whatever the search did.
"""

from __future__ import annotations

import bisect
import math
from functools import cached_property
from typing import Any, Callable, Iterable, Sequence

from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem
from mindspeed_fx.passes.recompute.problem.segments import boundaries
from mindspeed_fx.passes.recompute.solve.lower_bound import least_seconds
from mindspeed_fx.passes.recompute.solve.min_cut import Cuts
from mindspeed_fx.passes.recompute.solve.threshold_accepting import anneal

PRICES = 8
"""Prices tried with each set of values that are kept for nothing, in equal ratios between the cheapest recomputation
and the dearest. With 24 plans were 0.001 % faster (these and the numbers below:
benchmarks/results/2026-11-22-solver_ablation.txt).
"""

BETWEEN = 24
"""Further prices, each between two that were tried. Without them the least peak was 0.4 % larger, 6 % at worst."""

LARGE = 8_000
"""Nodes from which on fewer prices are tried, in proportion: planning stays in seconds."""

WORK, TRIES = 800_000, 4000
"""Nodes that one walk may go over, and plans it may look at. With half of both plans were 0.45 % slower at the three
smallest limits.
"""

FASTEST, LEAST = 0.3, 0.05
"""By what share a walk accepts worse plans at first, in seconds and in bytes: with 0.3 for bytes, too, the least peak
was 0.8 % larger, 4 % at worst.
"""

ABOVE = 10.0
"""Price of a plan that takes twice the limit, in times of what the first plan costs: a walk comes back to what fits."""

Evaluate = Callable[[frozenset[int], float], Plan | None]
"""The plan of a choice; None where there is none, or where it takes more than so many seconds."""


class Search:
    """Plans of one schedule.

    Args:
        unplanned: prices of running a node again where no budget presses; they give the plan without a budget.

    Attributes:
        hull: plans from saving what costs anything to make again, to making again whatever may be; empty when the
            backward needs what can be neither saved nor recomputed.
    """

    def __init__(self, schedule: RematProblem, unplanned: Sequence[float] | None = None):
        self.schedule, self.cuts = schedule, Cuts(schedule)
        self._returned = {schedule.root[i] for i in schedule.returned}
        self._seen: dict[frozenset[int], Plan | None] = {}
        first = (
            self._cut(0.0)
            if unplanned is None or unplanned == schedule.seconds
            else Cuts(schedule, unplanned).cheapest(lambda v: 0.0)[0]
        )
        self.hull = [p for p in [self._plan(first)] if p]
        ratios = [
            schedule.seconds[v] / schedule.saved_bytes[v]
            for v in self.cuts.values
            if schedule.saved_bytes[v] and 0 < schedule.seconds[v] < math.inf
        ]
        low, high = (min(ratios), max(ratios) * 64) if ratios else (1.0, 1.0)
        count, between = (max(4, n * LARGE // max(LARGE, len(schedule.sources))) for n in (PRICES, BETWEEN))
        prices = [low * (high / low) ** (i / (count - 1)) for i in range(count)]
        self.hull += [p for p in (self._plan(self._cut(price)) for price in prices) if p]
        self.hull = self._between(between)
        for free in boundaries(schedule):
            for price in prices:
                self._plan(self._cut(price, free))

    def _between(self, count: int) -> list[Plan]:
        """The hull with ``count`` further cuts: at the price where two neighbours cost the same, a third may cost
        less.
        """
        plans, pairs = {p.saved: p for p in self.hull}, list(zip(self.hull, self.hull[1:]))
        for _ in range(count):
            pairs.sort(key=lambda p: self._kept(p[0]) - self._kept(p[1]))
            if not pairs or (width := self._kept(pairs[-1][0]) - self._kept(pairs[-1][1])) <= 0:
                break
            rich, lean = pairs.pop()
            plan = self._plan(self._cut(max(0.0, lean.seconds - rich.seconds) / width))
            if plan and plan.saved not in plans and self._kept(lean) < self._kept(plan) < self._kept(rich):
                plans[plan.saved] = plan
                pairs += [(rich, plan), (plan, lean)]
        first, *others = plans.values() if plans else (None,)
        by_bytes = sorted(others, key=lambda p: (-self._kept(p), p.seconds, sorted(p.saved)))
        return [p for p in (first, *by_bytes) if p]

    def _kept(self, plan: Plan) -> int:
        return sum(self.schedule.saved_bytes[v] for v in plan.saved if v not in self._returned)

    @property
    def empty(self) -> bool:
        """The backward needs what can be neither saved nor recomputed."""
        return not self.hull

    @property
    def richest(self) -> Plan:
        """The plan without a budget."""
        return self.hull[0]

    @cached_property
    def least(self) -> Plan:
        """The smallest peak found; ties go to the faster plan."""
        start, evaluate = min((p for p in self._seen.values() if p), key=_size), self.schedule.evaluate
        return self._walk(start, lambda saved, most: evaluate(saved), lambda p: p.bytes, _size, LEAST)

    def best(self, limit: int) -> Plan | None:
        """The fastest plan found whose peak is at most ``limit`` bytes; None when none was found."""
        if self.richest.bytes <= limit:
            return self.richest
        start = self._fastest(limit) or self.least
        return self.walk(self._filled(start, limit), limit) if start.bytes <= limit else None

    def _filled(self, lean: Plan, limit: int) -> Plan:
        """``lean`` with as much as fits of what the next faster plan saves beside: the last of the forward first, the
        first of it, or the dearest per byte.
        """
        rich = next((p for p in reversed((self.richest, *self.frontier())) if p.seconds < lean.seconds), lean)
        extra = sorted(rich.saved - lean.saved)
        worth = lambda v: -self.schedule.seconds[v] / max(1, self.schedule.saved_bytes[v])  # noqa: E731
        for order in (sorted(extra, key=worth), extra[::-1], extra):
            fits = lambda n: (p := self._plan(lean.saved.union(order[: n + 1]))) and p.bytes <= limit  # noqa: B023
            bisect.bisect_left(range(len(order)), True, key=lambda n: not fits(n))
        return self._fastest(limit) or lean

    def walk(self, start: Plan, limit: int, seed: int = 0) -> Plan:
        """A plan of at most ``limit`` bytes that is no slower than ``start``, which is one."""
        above = ABOVE * start.seconds / max(1, limit)
        price = lambda p: p.seconds + above * max(0, p.bytes - limit)  # noqa: E731
        rank = lambda p: (p.bytes > limit, *_rank(p))  # noqa: E731
        return self._walk(start, self.schedule.evaluate, price, rank, FASTEST, seed)

    def bound(self, limit: int, rounds: int = 40) -> float | None:
        """What :func:`mindspeed_fx.passes.recompute.solve.lower_bound.least_seconds` says of the whole step."""
        return least_seconds(self.schedule, self.cuts, limit, rounds)

    def frontier(self) -> list[Plan]:
        """The plans tried that no other beats in both time and peak, fastest first."""
        results: list[Plan] = []
        for p in sorted((p for p in self._seen.values() if p), key=_rank):
            if not results or p.bytes < results[-1].bytes:
                results.append(p)
        return results

    def points(self) -> list[tuple[float, int]]:
        """(seconds, peak) of the :meth:`frontier`."""
        return [(p.seconds, p.bytes) for p in self.frontier()]

    def _fastest(self, limit: int) -> Plan | None:
        return min((p for p in self._seen.values() if p and p.bytes <= limit), key=_rank, default=None)

    def _walk(self, start: Plan, evaluate: Evaluate, price: Any, rank: Any, worse: float, seed: int = 0) -> Plan:
        """:func:`mindspeed_fx.passes.recompute.solve.threshold_accepting.anneal` over all values that may be saved or
        not.
        """
        problem, seen = self.schedule, self._seen
        fixed = {v for v in self.cuts.values if not problem.savable[v] or problem.must_recompute[v]} | self._returned
        values = [v for v in self.cuts.values if problem.saved_bytes[v] and v not in fixed]
        tries = min(TRIES, WORK // max(1, len(problem.sources)))
        known = lambda saved, most: seen[saved] if saved in seen else evaluate(saved, most)  # noqa: E731
        result = anneal(problem, start, values, tries, known, price, rank, worse, seed)
        seen[result.saved] = result
        return result

    def _cut(self, price: float, free: frozenset[int] = frozenset()) -> frozenset[int]:
        held, free = self.schedule.saved_bytes, self._returned | free
        return self.cuts.cheapest(lambda v: 0.0 if v in free else price * held[v])[0]

    def _plan(self, saved: Iterable[int]) -> Plan | None:
        saved = frozenset(saved)
        if saved not in self._seen:
            self._seen[saved] = self.schedule.evaluate(saved)
        return self._seen[saved]


def _rank(plan: Plan) -> tuple[float, int, list[int]]:
    """Faster first, then smaller, then whatever is the same everywhere."""
    return plan.seconds, plan.bytes, sorted(plan.saved)


def _size(plan: Plan) -> tuple[int, float, list[int]]:
    """Smaller first, then faster."""
    return plan.bytes, plan.seconds, sorted(plan.saved)
