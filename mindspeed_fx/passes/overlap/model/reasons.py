"""Why a collective stays exposed, in words a user can act on."""

from __future__ import annotations

import numpy as np

from mindspeed_fx.passes.overlap.model.simulator import Timeline
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, TaskGraph

HIDDEN = 0.01
"""A collective counts as hidden when at most this share of its time is exposed."""

EXAMINED = 64
"""Exposed collectives, longest exposure first, whose independent work is counted; it costs one walk of the graph
each.
"""


def independent_seconds(graph: TaskGraph, transfer: int) -> float:
    """Seconds of compute that neither come before ``transfer`` nor wait for it."""
    seen = {transfer}
    for stack, step in (([transfer], lambda i: graph.tasks[i].needs), ([transfer], lambda i: graph.users[i])):
        while stack:
            for i in step(stack.pop()):
                if i not in seen:
                    seen.add(i)
                    stack.append(i)
    return max(
        graph.busy()[COMPUTE] - sum(graph.tasks[i].seconds for i in seen if graph.tasks[i].resource == COMPUTE), 0.0
    )


def is_hidden(timeline: Timeline, transfer: int) -> bool:
    """True when at most :data:`HIDDEN` of the transfer's time is exposed."""
    return timeline.exposed.get(transfer, 0.0) <= HIDDEN * timeline.graph.tasks[transfer].seconds


def hideable(graph: TaskGraph) -> list[int]:
    """Transfers with at least their own time of independent compute: the others cannot be hidden by any order."""
    size = len(graph)
    seconds = np.array([t.seconds if t.resource == COMPUTE else 0.0 for t in graph.tasks])
    near = [0] * size  # tasks before it or behind it, as bits
    for across, order in (
        (lambda i: graph.tasks[i].needs, range(size)),
        (lambda i: graph.users[i], range(size - 1, -1, -1)),
    ):
        reached = [0] * size
        for i in order:
            for n in across(i):
                reached[i] |= reached[n] | 1 << n
        for i in graph.transfers:
            near[i] |= reached[i]
    bits = lambda i: np.unpackbits(
        np.frombuffer(near[i].to_bytes((size + 7) // 8, "little"), dtype=np.uint8), count=size, bitorder="little"
    )
    total = float(seconds.sum())
    return [
        i
        for i in graph.transfers
        if graph.tasks[i].seconds > 0 and total - float(seconds @ bits(i)) >= graph.tasks[i].seconds * (1 - 1e-9)
    ]


def share_hidden(timeline: Timeline) -> float | None:
    """Of the communication that could be hidden, in seconds, the share that is: (S - T) / (S - B).

    S is the step with nothing at once (total compute and transfers), T the schedule's, B the highest bound of the graph
    that was scheduled. S - B could be hidden; the rest is exposed in every order, for it is more than the compute there
    is, or has
    none that is independent: the first and last chunks around what takes the whole sequence. None where nothing could
        be hidden.
    """
    serial, bound = sum(timeline.graph.busy().values()), timeline.graph.highest_bound
    return (serial - timeline.seconds) / (serial - bound) if serial - bound > 1e-12 else None


def reasons(timeline: Timeline, unlimited: Timeline | None = None) -> dict[int, str]:
    """Exposed transfer -> why.

    Args:
        timeline: the schedule.
        unlimited: what the same scheduler does when memory does not count; None when memory was not limited.
    """
    graph = timeline.graph
    exposed = sorted(
        (i for i in timeline.exposed if not is_hidden(timeline, i)), key=lambda i: (-timeline.exposed[i], i)
    )
    ended = {
        (graph.tasks[i].resource, timeline.end[i]): i for i in timeline.order if graph.tasks[i].resource != COMPUTE
    }
    return {
        i: f"{_ms(timeline.exposed[i])} of {_ms(graph.tasks[i].seconds)} exposed: "
        f"{_why(timeline, unlimited, i, rank < EXAMINED, ended)}"
        for rank, i in enumerate(exposed)
    }


def _why(
    timeline: Timeline, unlimited: Timeline | None, i: int, examine: bool, ended: dict[tuple[str, float], int]
) -> str:
    graph, task = timeline.graph, timeline.graph.tasks[i]
    if examine:
        independent = independent_seconds(graph, i)
        if independent <= 1e-9:
            return "no independent work; all other compute comes before it or needs its result"
        if unlimited is not None and unlimited.exposed.get(i, 0.0) < 0.5 * timeline.exposed[i]:
            return (
                f"memory allowance; hidden with {(unlimited.peak - timeline.peak) / 2**20:.1f} MiB more (option "
                "overlap_memory)"
            )
        if independent < task.seconds:
            return f"only {_ms(independent)} of independent work in the graph"
    ahead = ended.get((task.resource, timeline.start[i]), i)
    busy = graph.busy()
    if busy[task.resource] > busy[COMPUTE]:
        return (
            f"communication bound; link {task.resource} needs {_ms(busy[task.resource])} and there is "
            f"{_ms(busy[COMPUTE])} of compute"
        )
    ready = max((timeline.end[n] for n in task.needs), default=0.0)
    if ahead != i and timeline.start[i] > ready:
        return f"order on link {task.resource}; {graph.tasks[ahead].name} was in front of it"
    return "its independent work comes too late, or hides other collectives"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
