"""The pipeline schedule of a plan, and how many stages each rank has: torch's own orders, played with a plan's seconds.

The search prices stages under 1F1B; of what it returns, each plan gets the schedule whose step is the shortest among
those that fit in memory. A stage of a rank with v takes a v-th of a microbatch's seconds, and v times as many messages
go between ranks. A backward is taken to be half the gradients of inputs and half those of weights; what is recomputed
comes before both.
"""

from __future__ import annotations

from typing import Iterator

from mindspeed_fx.cost.pipeline import Parts, play_stages, torch_order
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.solve import Solution

VIRTUAL = (2, 3, 4)
"""Stages on a rank that are tried."""

MOST = 20_000
"""Actions of a step, about: orders of more are not made, for it takes seconds. (A rank of 16 with two stages and 100
microbatches: 0.3 s.)"""


def choose_schedule(solution: Solution, layers: int, limit: float) -> None:
    """Give ``solution`` its schedule, in place: name, seconds of the step and of the bubble, bytes kept.

    Args:
        limit: bytes that a rank may hold.
    """
    layout, before = solution.layout, dict(solution.parts)
    if layout.pp == 1:
        return
    kept = solution.bytes["kept"] / min(layout.pp, layout.microbatches)
    for name, virtual in _candidates(layout, layers):
        try:
            order = torch_order(name, layout.pp, layout.pp * virtual, layout.microbatches)
        except ValueError:  # numbers of microbatches that it does not take
            continue
        messages = solution.between * (virtual - 1)
        steady = before["compute"] + before["recompute"] + before["collectives"] + messages
        played = play_stages(order, [_parts(before, messages, layout, virtual)] * (layout.pp * virtual))
        stored = {**solution.bytes, "kept": played.waiting * kept / virtual}
        parts = {**before, "collectives": before["collectives"] + messages, "bubble": played.seconds - steady}
        if sum(parts.values()) < solution.seconds * (1 - 1e-9) and sum(stored.values()) <= limit:
            solution.seconds, solution.memory = sum(parts.values()), sum(stored.values())
            solution.parts, solution.bytes, solution.schedule = parts, stored, f"{name}:{virtual}"


def _candidates(layout: Layout, layers: int) -> Iterator[tuple[str, int]]:
    """Schedules that may run, with how many stages a rank has."""
    for virtual in VIRTUAL:
        if layout.pp * virtual > layers or 3 * layout.pp * virtual * layout.microbatches > MOST:
            continue
        for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            yield name, virtual
        if virtual == 2:
            yield "ZBVZeroBubble", 2
            if layout.microbatches >= layout.pp * virtual:
                yield "DualPipeV", 2


def _parts(parts: dict[str, float], messages: float, layout: Layout, virtual: int) -> Parts:
    """Seconds of a microbatch on one stage."""
    stages = layout.microbatches * virtual
    compute, moved = parts["compute"] / 3 / stages, (parts["collectives"] + messages) / 2 / stages
    return Parts(compute + moved, parts["recompute"] / stages, compute + moved, compute)
