"""Schedules of a pipeline as the search prices them: how long ranks wait for each other, and how many microbatches a
rank holds, for p ranks of v stages and m microbatches.

A step takes m times what its fullest rank computes of one microbatch, and

    (p - 1) / v * (a forward + b inputs + c weights)

seconds more: forward, gradients of inputs (with what is recomputed before them) and of weights of a microbatch on a
rank. What torch's own orders take when they are played (``cost/pipeline.py``) is this with

    1F1B, Interleaved1F1B    a = b = c = 1
    InterleavedZeroBubble    a = b = 1, c = -1

for p microbatches or more and equal stages; of unequal ones the mean is taken (within a hundredth or two where the last
is the longest, up to a tenth where the first is or chunks differ by a third). The idle time of ZBVZeroBubble and
DualPipeV is no linear form: its least is a = 1, b = c = 0, and a solution is priced by playing it. Sources: Narayanan
et al. 2021, arXiv 2104.04473 (interleaved); Qi et al. 2024, arXiv 2401.10241 (zero bubble) and 2405.15362 (V);
DeepSeek-V3 (DualPipe); the fits: tests/sharding/test_schedules.py.
"""

from __future__ import annotations

import functools
from typing import Iterator, Sequence

from mindspeed_fx.cost.pipeline import Parts, play_stages, torch_order
from mindspeed_fx.planning.search.layouts import Layout

VIRTUAL = (2, 3, 4)
"""Stages on a rank that are tried."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
IDLE = {"InterleavedZeroBubble": (1.0, 1.0, -1.0), **dict.fromkeys(V_SHAPED, (1.0, 0.0, 0.0))}
"""(a, b, c) of the schedules whose are not all 1."""

MOST = 20_000
"""Actions of a step, about, up to which schedules that must be played are considered. (A rank of 16 with two stages
and 100 microbatches: 0.3 s.)"""


def schedules(layout: Layout, layers: int) -> Iterator[tuple[str, int]]:
    """Names and stages on a rank that a layout may run with, 1F1B first."""
    p, m = layout.pp, layout.microbatches
    yield "1F1B", 1
    if p == 1 or m < p:
        return
    for virtual in (v for v in VIRTUAL if p * v <= layers):
        if m % max(1, m // p) == 0:
            yield "Interleaved1F1B", virtual
            yield "InterleavedZeroBubble", virtual
        if virtual == 2 and 6 * p * m <= MOST:
            yield "ZBVZeroBubble", 2
            if m >= 2 * p:
                yield "DualPipeV", 2


def idle_times(layout: Layout) -> tuple[float, float, float]:
    """How often a rank waits, at least, for the forward of a microbatch, for the gradients of its inputs, and for those
    of its weights.
    """
    each = (layout.pp - 1) / layout.virtual
    return tuple(each * x for x in IDLE.get(layout.schedule, (1.0, 1.0, 1.0)))  # type: ignore[return-value]


def idle_at_least(layout: Layout, steady: float, forward: float) -> float:
    """Seconds of a step that a rank waits at least.

    Args:
        steady, forward: seconds of a microbatch on the mean rank, and of its forward, at least.
    """
    waits = idle_times(layout)
    return min(waits) * steady if min(waits) > 0 else waits[0] * forward


def in_flight(layout: Layout, rank: int) -> float:
    """Microbatches whose activations a rank keeps at once, each as often as the rank has stages: the most, of all of
    its layers. (Under 1F1B the last rank keeps one; of other schedules it is the fullest rank's.)"""
    p, m, v = layout.pp, layout.microbatches, layout.virtual
    together = m // max(1, m // p)
    most = {
        "1F1B": p - rank,
        "Interleaved1F1B": (v - 1) * together + 2 * p - 1,
        "InterleavedZeroBubble": (v - 1) * together + p,
        "ZBVZeroBubble": 2 * p,
        "DualPipeV": 2 * p + 1,
    }[layout.schedule]
    return min(most, m * v) / v


def rank_of_stage(layout: Layout, stage: int) -> int:
    turn, place = divmod(stage, layout.pp)
    return layout.pp - 1 - place if turn % 2 and layout.schedule in V_SHAPED else place


def waiting_seconds(layout: Layout, stages: Sequence[Parts], fullest: float) -> float:
    """Seconds of a step in which the fullest rank has nothing to do.

    Args:
        stages: seconds of a microbatch on each stage of the pipeline.
        fullest: seconds of a microbatch on the fullest rank.
    """
    if layout.pp == 1:
        return 0.0
    if layout.schedule not in V_SHAPED:
        sums = [sum(x) / layout.pp for x in zip(*((s.forward, s.recompute + s.inputs, s.weights) for s in stages))]
        return sum(times * x for times, x in zip(idle_times(layout), sums))
    joined = [Parts(s.forward, 0.0, s.recompute + s.inputs, s.weights) for s in stages]
    order = _order(layout.schedule, layout.pp, len(stages), layout.microbatches)
    return play_stages(order, joined).seconds - layout.microbatches * fullest


@functools.lru_cache(maxsize=64)
def _order(name: str, ranks: int, stages: int, microbatches: int) -> list:
    return torch_order(name, ranks, stages, microbatches)
