"""Threshold accepting (Dueck and Scheuer 1990): single values are saved, recomputed or exchanged at random, and what is
a little worse is accepted too, ever less of it.

Plans above the limit are walked through, at a price for what they are above it: between two plans that fit there is
often none that does. Random numbers come from a generator with a fixed seed, and work is counted in plans tried, so
that every rank walks the same way.
"""

from __future__ import annotations

from random import Random
from typing import Callable, Iterable

from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem

FIRST = 0.3
"""What is accepted at first: worse by up to this share of what the first plan costs. It falls with the square of the
tries that are left.
"""

ABOVE = 10.0
"""Price of a plan that takes twice the limit, in times of what the first plan costs."""

ADD, DROP, TWO = 0.25, 0.2, 0.25
"""Of all tries, those that save one value more, and one less; of the others, which exchange, those that take or give
one more.
"""

NEAR = 0.3
"""Of all exchanges, those with what is computed from the value, or what that is computed from."""


def anneal(
    schedule: RematProblem,
    start: Plan,
    limit: int,
    values: Iterable[int],
    tries: int,
    plan: Callable[[frozenset[int], float], Plan | None],
    seed: int = 0,
) -> Plan:
    """The fastest plan of at most ``limit`` bytes on the way, ``start`` if that is.

    Args:
        start: a plan that fits.
        values: which may be saved or not.
        tries: plans looked at.
        plan: of a choice; None where there is none, or where it takes more than so many seconds.
    """
    free, random = set(values), Random(seed).random
    near = _near(schedule, free)
    pick = lambda many: many[int(random() * len(many))]  # noqa: E731
    above = ABOVE * start.seconds / max(1, limit)
    best = now = start
    cost, kept, results = start.seconds, *_lists(schedule, start, free)
    for n in range(tries):
        most = cost + FIRST * start.seconds * (1 - n / tries) ** 2 * random()
        choice, turn = set(now.saved), random()
        if turn < ADD and results:
            choice.add(pick(results))
        elif turn < ADD + DROP and kept:
            choice.discard(pick(kept))
        elif kept and results:
            out = pick(kept)
            choice.discard(out)
            choice.add(pick(near[out] if near[out] and random() < NEAR else results))
            if (more := random()) < TWO / 2:
                choice.discard(pick(kept))
            elif more < TWO:
                choice.add(pick(results))
        result = plan(frozenset(choice), most)
        if result is None or result is now or (price := result.seconds + above * max(0, result.bytes - limit)) > most:
            continue
        now, cost = result, price
        kept, results = _lists(schedule, now, free)
        if now.bytes <= limit and (now.seconds, now.bytes) < (best.seconds, best.bytes):
            best = now
    return best


def _lists(schedule: RematProblem, plan: Plan, free: set[int]) -> tuple[list[int], list[int]]:
    """What a plan saves, and what it recomputes."""
    return sorted(plan.saved & free), sorted({schedule.root[i] for i in plan.recompute} & free - plan.saved)


def _near(schedule: RematProblem, free: set[int]) -> dict[int, list[int]]:
    """What each value is computed from, what is computed from it, and what is read beside it."""
    results: dict[int, set[int]] = {v: set() for v in free}
    for u in schedule.values:
        around = (schedule.reads(u) | {u}) & free
        for v in around:
            results[v] |= around - {v}
    return {v: sorted(others) for v, others in results.items()}
