"""The plans of a step as the graph has it: searched without its views
(:mod:`mindspeed_fx.passes.recompute.problem.contract`), each handed out evaluated as the whole step."""

from __future__ import annotations

from functools import cached_property
from typing import Sequence

from mindspeed_fx.passes.recompute.problem.contract import contract
from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem
from mindspeed_fx.passes.recompute.solve.budget_search import Search, _rank, _size
from mindspeed_fx.passes.recompute.solve.row_generation import optimum

WALKS = 8
"""Walks of threshold accepting before the integer programs, which have less to look for the faster the plan is that is
known. With these walks, values and nodes the row "certified" of benchmarks/memory_rivals.py was measured.
"""

FEW = 400
"""Values up to which integer programs are tried at all."""

NODES = 2000
"""Nodes of the search tree of one such program."""


class WholeStep(Search):
    """Plans of ``schedule``; arguments as :class:`Search`'s.

    Attributes:
        small: the step without its views.
        inner: the search of it.
    """

    def __init__(self, schedule: RematProblem, unplanned: Sequence[float] | None = None):
        self.schedule, self._seen = schedule, {}
        self.small, self._nodes, prices = contract(schedule, unplanned)
        self.inner = Search(self.small, prices)

    def _whole(self, plan: Plan) -> Plan | None:
        """A plan of the step without its views as one of the whole; None where values that the user moves or saves
        leave the whole without what the other can make again.
        """
        return self._plan(self._nodes[v] for v in plan.saved)

    @property
    def empty(self) -> bool:
        return not any(map(self._whole, self.inner.hull))

    @cached_property
    def richest(self) -> Plan:
        return next(filter(None, map(self._whole, self.inner.hull)))

    @cached_property
    def hull(self) -> list[Plan]:
        return [p for p in map(self._whole, self.inner.hull) if p]

    def frontier(self) -> list[Plan]:
        for p in self.inner.frontier():
            self._whole(p)
        return super().frontier()

    def points(self) -> list[tuple[float, int]]:
        return self.inner.points()

    @cached_property
    def least(self) -> Plan:
        near = (self.inner.least, *sorted(filter(None, self.inner._seen.values()), key=_size))
        return next(filter(None, map(self._whole, near)), self.richest)

    def best(self, limit: int) -> Plan | None:
        if self.richest.bytes <= limit:
            return self.richest
        inner = self.inner.best(limit)
        plans = (inner and self._whole(inner), self.least)
        return min((p for p in plans if p and p.bytes <= limit), key=_rank, default=None)

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
        for seed in range(1, WALKS + 1):
            known = min(known, self.inner.walk(known, limit, seed), key=_rank)
        result = optimum(self.small, limit, nodes, clock, known)
        better = [self._whole(p) for p in (known, result.plan) if p]
        return min((p for p in (plan, *better) if p and p.bytes <= limit), key=_rank), result.seconds

    def bound(self, limit: int, rounds: int = 40) -> float | None:
        return self.inner.bound(limit, rounds)
