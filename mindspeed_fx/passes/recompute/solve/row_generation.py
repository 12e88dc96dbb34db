"""The least time of small steps, and a plan that takes it: the integer program is solved, rows for the moments at which
its answer does not fit the simulated step are added, and it is solved again (row generation).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Iterable

from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem
from mindspeed_fx.passes.recompute.solve.integer_program import Program
from mindspeed_fx.passes.recompute.solve.lower_bound import moments

ROUNDS = 24
"""Programs solved for one limit: with as many the row "certified" of benchmarks/memory_rivals.py was measured."""

CLOSE = 1e-4
"""A plan that is known already is called the optimum when nothing is faster by more than this share."""


@dataclass(frozen=True)
class Optimum:
    """What the programs say of one limit."""

    seconds: float | None
    """No plan that fits takes less; None: none fits."""
    plan: Plan | None = None
    """The fastest plan that was found beside the one known."""
    rounds: int = 0
    """Programs solved."""


def exact_seconds(
    schedule: RematProblem, limit: int, nodes: int = 1000, clock: float | None = None, known: Plan | None = None
) -> float | None:
    """A lower bound of :attr:`Plan.seconds` over all plans of at most ``limit`` bytes; None when it proves that there
    are none. See :func:`optimum`.
    """
    return optimum(schedule, limit, nodes, clock, known).seconds


def optimum(
    schedule: RematProblem,
    limit: int,
    nodes: int = 1000,
    clock: float | None = None,
    known: Plan | None = None,
    rounds: int = ROUNDS,
) -> Optimum:
    """The least time of all plans of at most ``limit`` bytes, as far as it can be proved, and a plan that takes it.

    Args:
        nodes: of each program's search tree.
        clock: seconds that all programs may take together; None: as many as the nodes need. With it two runs may find
            different bounds.
        known: a plan that fits, so that only faster ones are looked for.

    Raises:
        ImportError: without scipy.
    """
    rows = moments(schedule)
    if max(rows.certain, default=0) > limit:
        return Optimum(None)
    if not schedule.values:
        return Optimum(0.0)
    program = Program(schedule, rows, limit)
    until, best, result = None if clock is None else time.monotonic() + clock, 0.0, None
    for n in range(1, rounds + 1):
        remaining = None if until is None else until - time.monotonic()
        if remaining is not None and remaining <= 0:
            break
        saved, proved = program.solve(nodes, remaining, None if known is None else known.seconds * (1 - CLOSE))
        if proved is None:  # nothing is faster than what is known
            return Optimum(None if known is None else max(best, known.seconds * (1 - CLOSE)), result, n)
        best = max(best, proved)
        if saved is None:
            break
        plan = _read(schedule, saved)
        if plan and plan.bytes <= limit:
            result = plan if result is None or plan.seconds < result.seconds else result
            if known is None or plan.seconds < known.seconds:
                known = plan
            if plan.seconds <= best * (1 + CLOSE):
                break
        elif plan is None or not program.refine(plan):
            break
    return Optimum(best, result, n)


def _read(schedule: RematProblem, saved: Iterable[int]) -> Plan | None:
    """The plan that saves of ``saved`` what the backward reads."""
    plan, before = schedule.evaluate(saved), None
    while plan and plan.saved != before:
        run, _, cut = schedule.trace(plan)
        read = {schedule.root[a] for i in run[cut:] for a in schedule.sources[i]} | {
            schedule.root[i] for i in schedule.returned
        }
        before = plan.saved
        plan = schedule.evaluate(plan.saved & read)
    return plan
