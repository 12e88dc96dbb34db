"""The least time under a limit of the peak.

1. With a price per saved byte the best choice is a minimum cut (:mod:`mindspeed_fx.passes.recompute.solve.min_cut`). A
   rising price walks along the lower hull of time against memory, from saving everything to making everything again.
2. Of two neighbours on the hull, the richer does not fit and the leaner does. Between them values are given back, in
   several orders, as many as fit: layers are decided one by one.
3. Threshold accepting (:mod:`mindspeed_fx.passes.recompute.solve.threshold_accepting`) leaves the neighbourhood of that
   plan, also through plans that do not fit; then a local search adds, drops and swaps single values while that saves
   time. Work is counted in plans tried, not in time, so that every rank finds the same plan.

All peaks are those of the simulated step, so a plan that fits in the model fits in the model whatever the search did.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Callable, Iterable, Sequence

from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem
from mindspeed_fx.passes.recompute.problem.segments import boundaries
from mindspeed_fx.passes.recompute.solve.lower_bound import least_seconds
from mindspeed_fx.passes.recompute.solve.min_cut import Cuts
from mindspeed_fx.passes.recompute.solve.threshold_accepting import anneal

PRICES = 24
"""Points tried on the hull, in equal ratios between the cheapest recomputation and the dearest."""

MORE = 24
"""Further points tried, each between two that were found."""

SHARES = 8
"""Prices tried with each set of boundaries that are kept for nothing (:mod:`segments`)."""

LARGE = 8_000
"""Nodes from which on fewer points and orders are tried, in proportion: planning stays in seconds."""

WORK = 120_000
"""Nodes that the local search may walk over, between :data:`TRIES` and :data:`MOST` plans."""

TRIES, MOST = 8, 600

WALK_WORK, MOST_WALK = 800_000, 4000
"""Nodes that threshold accepting (:mod:`mindspeed_fx.passes.recompute.solve.threshold_accepting`) may walk over, and
plans it may look at.
"""

FOLDED = 0.35
"""Part of that where layers are folded: such plans take longer to walk over, and what crosses between layers stays as
it is.
"""

AFTER = 0.25
"""Part of :data:`WORK` that is left for the local search behind such a walk."""

FILL_WORK = 80_000
"""Nodes that filling the room between two plans may walk over, between :data:`FILLS` and :data:`MOST_FILLS` plans."""

FILLS, MOST_FILLS = 24, 240


class Search:
    """Plans of one schedule.

    Args:
        unplanned: prices of running a node again where no budget presses; they give the plan without a budget.
        kept: sets of values to try as kept for nothing, in place of the hull and of what crosses narrow places.

    Attributes:
        part: of :data:`WORK` that one local search may do.
        hull: plans from saving what costs anything to make again, to making again whatever may be; empty when the
            backward needs what can be neither saved nor recomputed.
    """

    def __init__(
        self,
        schedule: RematProblem,
        unplanned: Sequence[float] | None = None,
        kept: Sequence[frozenset[int]] | None = None,
    ):
        self.schedule, self.cuts, self.part = schedule, Cuts(schedule), 1.0
        self._returned = {schedule.root[i] for i in schedule.returned}
        self._seen: dict[frozenset[int], Plan | None] = {}
        first = (
            self._cut(0.0)
            if unplanned is None or unplanned == schedule.seconds
            else Cuts(schedule, unplanned).cheapest(lambda v: 0.0)[0]
        )
        self.hull = [p for p in [self._plan(first)] if p]
        ratios = [
            schedule.seconds[v] / schedule.held[v]
            for v in self.cuts.values
            if schedule.held[v] and 0 < schedule.seconds[v] < math.inf
        ]
        low, high = (min(ratios), max(ratios) * 64) if ratios else (1.0, 1.0)
        points, shares, self._more = (
            max(4, n * LARGE // max(LARGE, len(schedule.sources))) for n in (PRICES, SHARES, MORE)
        )
        if kept is None:
            for i in range(points):
                self._append(self.hull, self._plan(self._cut(low * (high / low) ** (i / (points - 1)))))
            self._densify()
        shares = shares if kept is None else shares
        for free in boundaries(schedule) if kept is None else kept:
            for i in range(shares):
                self._plan(self._cut(low * (high / low) ** (i / (shares - 1)), free))

    def _append(self, hull: list[Plan], plan: Plan | None) -> None:
        if plan and (not hull or plan.saved != hull[-1].saved):
            hull.append(plan)

    def _densify(self) -> None:
        """Points of the hull between those found: at the price where two neighbours cost the same, a third may cost
        less.
        """
        pairs = list(zip(self.hull, self.hull[1:]))
        between: dict[frozenset[int], list[Plan]] = {}
        for _ in range(self._more):
            pairs.sort(key=lambda p: self._kept(p[0]) - self._kept(p[1]))
            if not pairs or (width := self._kept(pairs[-1][0]) - self._kept(pairs[-1][1])) <= 0:
                break
            rich, lean = pairs.pop()
            plan = self._plan(self._cut(max(0.0, lean.seconds - rich.seconds) / width))
            if (
                plan
                and plan.saved not in (rich.saved, lean.saved)
                and self._kept(lean) < self._kept(plan) < self._kept(rich)
            ):
                pairs += [(rich, plan), (plan, lean)]
                between.setdefault(plan.saved, []).append(plan)
        results = {p.saved: p for p in (*self.hull, *(p for many in between.values() for p in many))}
        self.hull = (
            self.hull[:1]
            + sorted(
                (p for p in results.values() if p.saved != self.hull[0].saved),
                key=lambda p: (-self._kept(p), p.seconds, sorted(p.saved)),
            )
            if self.hull
            else []
        )

    def _kept(self, plan: Plan) -> int:
        return sum(self.schedule.held[v] for v in plan.saved if v not in self._returned)

    @property
    def empty(self) -> bool:
        """The backward needs what can be neither saved nor recomputed."""
        return not self.hull

    @property
    def richest(self) -> Plan:
        """The plan without a budget."""
        return self.hull[0]

    @cached_property
    def smallest(self) -> Plan:
        """The smallest peak of the plans tried so far."""
        return min((p for p in self._seen.values() if p), key=_size)

    @cached_property
    def least(self) -> Plan:
        """The smallest peak found; ties go to the faster plan."""
        return self._descend(self.smallest, _size, None)

    def best(self, limit: int) -> Plan | None:
        """The fastest plan found whose peak is at most ``limit`` bytes; None when none was found."""
        if self.richest.bytes <= limit:
            return self.richest
        self._until = self.schedule.evaluations + max(
            FILLS, min(int(self.part * MOST_FILLS), int(self.part * FILL_WORK) // max(1, len(self.schedule.sources)))
        )
        k = next((k for k, p in enumerate(self.hull) if p.bytes <= limit), None)
        fits = [p for p in (self._fastest(limit), None if k is None else self.hull[k]) if p]
        for lean in dict.fromkeys(fits):
            faster = [p for p in self.frontier() if p.seconds < lean.seconds]
            for rich in dict.fromkeys(
                (*faster[-1:], self.richest, *faster[-2:-1], *self.hull[max(0, (k or 0) - 2) : k or 0])
            ):
                self._between(lean, rich, limit)
        if self._fastest(limit) is None and self.least.bytes > limit:
            return None
        return self._descend(self._annealed(self._fastest(limit), limit), _rank, limit)

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

    def whole(self, plan: Plan) -> Plan | None:
        """A plan as one of the step that its own stands for."""
        return plan

    def _annealed(self, best: Plan, limit: int) -> Plan:
        """What a walk makes of a plan that fits, where it is better as the whole step too."""
        part = self.part * FOLDED if self.schedule.edges else self.part
        result = self.walk(
            best, limit, min(int(part * MOST_WALK), int(part * WALK_WORK) // max(1, len(self.schedule.sources)))
        )
        before, after = self.whole(best), self.whole(result)
        return (
            best
            if before
            and before.bytes <= limit
            and not (after and after.bytes <= limit and after.seconds <= before.seconds)
            else result
        )

    def walk(self, start: Plan, limit: int, tries: int, seed: int = 0) -> Plan:
        """:func:`mindspeed_fx.passes.recompute.solve.threshold_accepting.anneal` from a plan that fits, over all values
        that may be saved or not.
        """
        schedule, seen = self.schedule, self._seen
        fixed = self._returned | schedule.edges
        values = [
            v
            for v in self.cuts.values
            if schedule.savable[v] and not schedule.must_recompute[v] and schedule.saved_bytes[v] and v not in fixed
        ]
        result = anneal(
            schedule,
            start,
            limit,
            values,
            tries,
            lambda saved, most: seen[saved] if saved in seen else schedule.evaluate(saved, most),
            seed,
        )
        seen[result.saved] = result
        return result

    def _descend(self, best: Plan, rank: Callable[[Plan], Any], limit: int | None) -> Plan:
        """The plan where no step that is tried leads to one of a better rank within the limit."""
        part = self.part if limit is None else self.part * AFTER
        work = self.schedule.evaluations + max(
            TRIES, min(int(part * MOST), int(part * WORK) // max(1, len(self.schedule.sources)))
        )
        while (better := self._improved(best, rank, limit, work)) is not None:
            best = better
        return best

    def _cut(self, price: float, free: frozenset[int] = frozenset()) -> frozenset[int]:
        held, free = self.schedule.held, self._returned | free
        return self.cuts.cheapest(lambda v: 0.0 if v in free else price * held[v])[0]

    def _plan(self, saved: Iterable[int]) -> Plan | None:
        saved = frozenset(saved)
        if saved not in self._seen:
            self._seen[saved] = self.schedule.evaluate(saved)
        return self._seen[saved]

    def _between(self, lean: Plan, rich: Plan, limit: int) -> None:
        """Of what ``rich`` saves beside, as much as fits: the last of the forward first, the first of it, the dearest
        per byte.
        """
        extra = sorted(rich.saved - lean.saved)
        value = lambda v: -self.schedule.seconds[v] / max(1, self.schedule.held[v])  # noqa: E731
        for order in (sorted(extra, key=value), extra[::-1], extra):
            low, high = 0, len(order)
            while low < high and self.schedule.evaluations < self._until:
                middle = (low + high + 1) // 2
                plan = self._plan(lean.saved | set(order[:middle]))
                low, high = (middle, high) if plan and plan.bytes <= limit else (low, middle - 1)
            saved = lean.saved | set(order[:low])
            for part in self.schedule.parts(order[low:]):  # one that does not fit may be larger than the next
                if self.schedule.evaluations >= self._until:
                    break
                plan = self._plan(saved | part)
                if plan and plan.bytes <= limit:
                    saved = plan.saved

    def _improved(self, best: Plan, rank: Callable[[Plan], Any], limit: int | None, work: int) -> Plan | None:
        """A better plan one step away; None when there is none or the work is done.

        Only what is recomputed is worth saving. Where a plan takes values out, it takes at least their own time more
        and at most their bytes less; what cannot be better or fit even so is not tried.
        """
        schedule, known = self.schedule, rank(best)
        seconds, held, keep = schedule.seconds, schedule.held, schedule.save_seconds
        fits = lambda p: p is not None and (limit is None or p.bytes <= limit) and rank(p) < known  # noqa: E731
        result = {schedule.root[i] for i in best.recompute}
        candidates = [
            v
            for v in self.cuts.values
            if v in result
            and v not in best.saved
            and schedule.savable[v]
            and not schedule.must_recompute[v]
            and schedule.saved_bytes[v]
        ]
        candidates.sort(key=lambda v: (-seconds[v] / held[v], v))
        kept = sorted(best.saved - self._returned, key=lambda v: (-schedule.saved_bytes[v], v))
        room = best.bytes if limit is None else limit

        def without(plan: Plan | None, *out: int) -> Iterable[frozenset[int]]:
            """The choice of ``plan`` without ``out``, where that may be better."""
            if (
                plan
                and plan.bytes - sum(held[u] for u in out) <= room
                and (limit is None or plan.seconds + sum(seconds[u] - keep[u] for u in out) <= best.seconds)
            ):
                yield plan.saved.difference(out)

        more: dict[int, Plan | None] = {}  # with one value more

        def add(v: int) -> Plan | None:
            if v not in more:
                more[v] = self._plan(best.saved | {v})
            return more[v]

        moves: list[Callable[[], Iterable[frozenset[int]]]] = [
            lambda: (best.saved | {v} for v in candidates),
            lambda: (saved for u in kept for saved in without(best, u)),
            lambda: (saved for v in candidates for u in kept for saved in without(add(v), u)),
            lambda: (
                saved
                for v in candidates
                for n, u in enumerate(kept)
                for w in kept[:n]
                for saved in without(add(v), u, w)
            ),
            lambda: (best.saved - {u} | {v, w} for u in kept for n, v in enumerate(candidates) for w in candidates[:n]),
        ]
        for move in moves:
            for saved in move():
                if schedule.evaluations >= work:
                    return None
                if fits(plan := self._plan(saved)):
                    return plan
        return None


def _rank(plan: Plan) -> tuple[float, int, list[int]]:
    """Faster first, then smaller, then whatever is the same everywhere."""
    return plan.seconds, plan.bytes, sorted(plan.saved)


def _size(plan: Plan) -> tuple[int, float, list[int]]:
    """Smaller first, then faster."""
    return plan.bytes, plan.seconds, sorted(plan.saved)
