"""Forms of a step take turns in rounds, so that the gain of one over another is a difference within a round: what a
shared machine does for longer than a round meets both."""

from __future__ import annotations

import random
from typing import Callable, Mapping

from mindspeed_fx.report import progress

WARMUP = 2
"""Rounds that are not counted."""
FEWEST, MOST = 5, 200
"""Rounds that are counted, however long or short one is."""


def interleave(
    runs: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    prepare: Callable[[], None],
    now: Callable[[], float],
    rounds: int | None = None,
) -> dict[str, list[float]]:
    """Seconds of every form in every round.

    Args:
        runs: name -> what runs the step once.
        seconds: for all rounds together, those that warm up apart.
        prepare: called before each step, not timed.
        now: a clock in seconds at which all work is done.
        rounds: how many are counted; None: as many as fit into ``seconds``, by the last round that warmed up.
    """
    names = list(runs)
    length = 0.0
    for _ in range(WARMUP):
        length = sum(_time(runs[name], prepare, now) for name in names)
    count = rounds or min(MOST, max(FEWEST, int(seconds / length) if length else MOST))
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)  # the same on every rank
    for number in range(count):
        progress.note(f"{number} of {count}", number, count)
        # In another order each round: a form that always came after the same other one would always find the same in
        # the caches, and eager steps leave little there.
        for name in order.sample(names, len(names)):
            samples[name].append(_time(runs[name], prepare, now))
    return samples


def _time(run: Callable[[], object], prepare: Callable[[], None], now: Callable[[], float]) -> float:
    prepare()
    start = now()
    run()
    return now() - start
