"""Which saved activations spend the time between forward and backward in host memory.

A copy out starts when the last reader of the forward is done, and its memory is free before the first call that starts
after the copy is over; a copy back starts before the last call that leaves it time enough. Each way is one queue of the
link's bandwidth, first come first served. What the two queues cannot hide is a stall: copies that are not over at the
end of the forward, and copies that would have to start before the backward does. A plan with moves is as fast as its
recomputation plus its stalls, in modelled seconds.

The search goes along the plans without moves from the fastest on. Of each that does not fit it moves some values, those
that are idle longest first or the largest first, and of all that fit takes the fastest; then values that were made
again are saved and moved where that is faster, and moves that are not needed are taken back. Work is counted in plans,
so that every rank finds the same.
"""

from __future__ import annotations

import bisect
from dataclasses import replace
from itertools import accumulate
from typing import Callable, Iterable, Sequence

from mindspeed_fx.passes.recompute.problem.remat_problem import Plan
from mindspeed_fx.passes.recompute.solve.budget_search import Search

PARTS = 8
"""How many shares of a plan's values are tried as moves, before the exact number is searched. Not varied in a
measurement, as the next two: no rival moves values."""

WORK = 600_000
"""Nodes that the search may walk over, at least :data:`TRIES` plans."""

TRIES = 64


class Timeline:
    """The step of one plan with times, for any choice of moves.

    Args:
        movable: the values that can be moved at all.
        rate: bytes per second of the link, each way.
        always: values that are moved in any case.
    """

    def __init__(self, search: Search, plan: Plan, movable: Iterable[int], rate: float, always: Iterable[int] = ()):
        s = self.schedule = search.schedule
        self.plan, self.rate = plan, rate
        self.run, _, self.cut = s.trace(plan)
        self.begin = list(accumulate((s.run_seconds[i] for i in self.run), initial=0.0))
        """Seconds at which each position starts; the last entry is the end."""
        self.turn = self.begin[self.cut]
        kept = {*movable, *always} & plan.saved
        self.last, self.first = {}, {}
        for t, i in enumerate(self.run):
            for r in s._blocks[i]:
                if r in kept and t < self.cut:
                    self.last[r] = t
                elif r in kept:
                    self.first.setdefault(r, t)
        existing = sorted(v for v in kept if v in self.last and v in self.first)
        self.always = [v for v in existing if v in set(always)]
        self.values = [v for v in existing if v not in set(always)]

    def idle(self, v: int) -> float:
        """Seconds between the last reader of the forward and the first of the backward."""
        return self.begin[self.first[v]] - self.begin[self.last[v] + 1]

    def moved(self, values: Iterable[int]) -> Plan:
        """The plan with ``values`` moved, and what always is: its peak, and its time with what the link cannot hide."""
        values = [*self.always, *values]
        moves, now = {}, 0.0
        for v in sorted(values, key=lambda v: (self.last[v], v)):
            now = max(now, self.begin[self.last[v] + 1]) + self.schedule.saved_bytes[v] / self.rate
            free = bisect.bisect_left(self.begin, now, self.last[v] + 1, self.cut)
            moves[v] = [v, free, 0]
        stall = max(0.0, now - self.turn)
        due = self.begin[-1]
        for v in sorted(values, key=lambda v: (-self.first[v], -v)):
            due = min(due, self.begin[self.first[v]]) - self.schedule.saved_bytes[v] / self.rate
            moves[v][2] = max(self.cut, min(self.first[v], bisect.bisect_right(self.begin, due) - 1))
        stall += max(0.0, self.turn - due) if values else 0.0
        plan = replace(
            self.plan, moves=tuple(tuple(w) for _, w in sorted(moves.items())), seconds=self.plan.seconds + stall
        )
        run, alive, _ = self.schedule.trace(plan)
        self.schedule.evaluations += 1
        top = max(alive, default=0)
        return replace(plan, bytes=top, at=run[alive.index(top)] if run else -1)


class Offload:
    """Plans with moves beside those of ``search``.

    Args:
        rate: bytes per second of the link, each way.
        host: bytes that may be in host memory at once; None: any number.
        always: values that every plan moves, where it saves them.
    """

    def __init__(
        self, search: Search, movable: Iterable[int], rate: float, host: int | None = None, always: Iterable[int] = ()
    ):
        returned = {search.schedule.root[i] for i in search.schedule.returned}
        self.search, self.rate, self.host = search, rate, host
        self.always = sorted(v for v in always if v not in returned)
        self.movable = [v for v in movable if v not in returned and v not in set(self.always)]

    def best(self, limit: int, plain: Plan | None) -> Plan | None:
        """The fastest plan found of at most ``limit`` bytes; ``plain`` is the best without moves."""
        work = self.search.schedule.evaluations + max(TRIES, WORK // max(1, len(self.search.schedule.sources)))
        best = plain
        if self.always and plain:
            best = self._line(plain).moved(())
            best = best if best.bytes <= limit else None
        for plan in self._plans():
            if best is not None and plan.seconds >= best.seconds or self.search.schedule.evaluations > work:
                break
            for result in self._some(plan, limit):
                best = result if best is None or _rank(result) < _rank(best) else best
        if best is not None and best.moves:
            best = self._improved(best, limit, work)
        return best

    def least(self) -> Plan:
        """The smallest peak found over all plans with everything moved that can be; ties go to the faster."""
        results = [self._line(self.search.least).moved(()) if self.always else self.search.least]
        for plan in self._plans():
            line = self._line(plan)
            results += [
                line.moved(some) for some in (line.values, line.values[: len(line.values) // 2]) if self._allowed(some)
            ]
        return min(results, key=lambda p: (p.bytes, p.seconds, sorted(p.saved)))

    def left(self, plan: Plan) -> list[int]:
        """What ought to be moved and is not."""
        moved = {v for v, _, _ in plan.moves}
        return [v for v in self.always if v not in moved]

    def told(self, plan: Plan) -> str:
        """What is moved, for reports."""
        moved = sum(self.search.schedule.saved_bytes[v] for v, _, _ in plan.moves)
        stall = plan.seconds - (self.search._plan(plan.saved) or plan).seconds
        return (
            f"moved to host memory {moved / 2**20:.2f} MiB in {len(plan.moves)} values at {self.rate / 1e9:.1f} "
            "GB/s "
            f"each way; {stall * 1e3:.3f} ms of the copies are not hidden"
        )

    def _plans(self) -> list[Plan]:
        """Plans without moves, fastest first."""
        unique = {p.saved: p for p in (*self.search.hull, *self.search.frontier())}
        return sorted(unique.values(), key=_rank)

    def _line(self, plan: Plan) -> Timeline:
        return Timeline(self.search, plan, self.movable, self.rate, self.always)

    def _allowed(self, values: Sequence[int]) -> bool:
        return (
            self.host is None or sum(self.search.schedule.saved_bytes[v] for v in {*values, *self.always}) <= self.host
        )

    def _some(self, plan: Plan, limit: int) -> list[Plan]:
        """``plan`` with as few values moved as fit, by each order."""
        line, results = self._line(plan), []
        for key in (lambda v: (-line.idle(v), v), lambda v: (-self.search.schedule.saved_bytes[v], -line.idle(v), v)):
            order = sorted(line.values, key=key)
            fits: Callable[[int], Plan | None] = lambda n: (
                p if self._allowed(order[:n]) and (p := line.moved(order[:n])).bytes <= limit else None
            )  # noqa: E731
            low = 0
            if self.always and (plan_there := fits(0)):
                results.append(plan_there)
                continue
            for part in range(1, PARTS + 1):
                count = len(order) * part // PARTS
                if count > low and (plan_there := fits(count)):
                    high = count
                    while high - low > 1:
                        middle = (low + high) // 2
                        low, high, plan_there = (low, middle, p) if (p := fits(middle)) else (middle, high, plan_there)
                    results.append(plan_there)
                    break
                low = count
        return results

    def _improved(self, best: Plan, limit: int, work: int) -> Plan:
        """Values recomputed that are saved and moved instead, and moves that are not needed."""
        schedule = self.search.schedule
        always = set(self.always)
        again = [
            v
            for v in self.movable
            if v in set(best.recompute)
            and schedule.savable[v]
            and not schedule.must_recompute[v]
            and schedule.saved_bytes[v]
        ]
        for v in sorted(again, key=lambda v: (-schedule.seconds[v] / schedule.saved_bytes[v], v)):
            moved = [w for w, _, _ in best.moves if w not in always] + [v]
            if schedule.evaluations > work or v in best.saved or not self._allowed(moved):
                continue
            if (
                (plan := self.search._plan(best.saved | {v}))
                and v in (line := self._line(plan)).first
                and set(moved) <= set(line.values)
            ):
                result = line.moved(moved)
                best = result if result.bytes <= limit and _rank(result) < _rank(best) else best
        line = self._line(replace(best, moves=(), seconds=self.search._plan(best.saved).seconds))
        for v in sorted((w for w, _, _ in best.moves if w not in always), key=lambda v: (-schedule.saved_bytes[v], v)):
            if schedule.evaluations > work:
                break
            result = line.moved(w for w, _, _ in best.moves if w != v and w not in always)
            best = result if result.bytes <= limit and result.seconds <= best.seconds else best
        return best


def _rank(plan: Plan) -> tuple[float, int, int, list[int]]:
    return plan.seconds, len(plan.moves), plan.bytes, sorted(plan.saved)
