"""Threshold accepting (Dueck and Scheuer 1990): single values are saved, recomputed or exchanged at random, and what is
a little worse is accepted too, ever less of it.

Plans above the limit are walked through, at a price for what they are above it: between two plans that fit there is
often none that does (without a walk, plans of the models of benchmarks/memory_rivals.py were up to 6 % slower at the
smallest limits). Random numbers come from a generator with a fixed seed, and work is counted in plans tried, so
that every rank walks the same way.
"""

from __future__ import annotations

from random import Random
from typing import Any, Callable, Iterable

from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem

ADD, DROP = 0.25, 0.2
"""Of all tries, those that save one value more, and one less; the others exchange. (Exchanges of three values, and of
neighbours above all, are gone: benchmarks/results/2026-11-22-solver_ablation.txt.)
"""


def anneal(
    problem: RematProblem,
    start: Plan,
    values: Iterable[int],
    tries: int,
    plan: Callable[[frozenset[int], float], Plan | None],
    price: Callable[[Plan], float],
    rank: Callable[[Plan], Any],
    worse: float,
    seed: int = 0,
) -> Plan:
    """The plan of the best rank on the way, which is no worse than ``start``.

    Args:
        values: which may be saved or not.
        tries: plans looked at.
        plan: of a choice; None where there is none, or where its price is certainly above so much.
        price: what the walk makes small.
        rank: smaller is better.
        worse: what is accepted at first, worse by up to this share of ``start``'s price; it falls with the square of
            the tries that are left.
    """
    free, random = set(values), Random(seed).random
    pick = lambda many: many[int(random() * len(many))]  # noqa: E731
    best = now = start
    first = cost = price(start)
    saved, recomputed = _lists(problem, start, free)
    for n in range(tries):
        most = cost + worse * first * (1 - n / tries) ** 2 * random()
        choice, turn = set(now.saved), random()
        if saved and turn >= ADD:
            choice.discard(pick(saved))
        if recomputed and not ADD <= turn < ADD + DROP:
            choice.add(pick(recomputed))
        result = plan(frozenset(choice), most)
        if result is None or result is now or (worth := price(result)) > most:
            continue
        now, cost = result, worth
        saved, recomputed = _lists(problem, now, free)
        best = min(best, now, key=rank)
    return best


def _lists(problem: RematProblem, plan: Plan, free: set[int]) -> tuple[list[int], list[int]]:
    """What a plan saves, and what it recomputes."""
    return sorted(plan.saved & free), sorted({problem.root[i] for i in plan.recompute} & free - plan.saved)
