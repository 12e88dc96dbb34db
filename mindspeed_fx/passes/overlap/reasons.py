"""Why a collective stays exposed, in words a user can act on."""

from __future__ import annotations

from mindspeed_fx.passes.overlap.simulate import Timeline
from mindspeed_fx.passes.overlap.tasks import COMPUTE, TaskGraph

HIDDEN = 0.01
"""A collective counts as hidden when at most this share of its time is exposed."""

EXAMINED = 64
"""Exposed collectives, longest exposure first, whose independent work is counted; it costs one walk of the graph each."""


def independent_seconds(graph: TaskGraph, transfer: int) -> float:
    """Seconds of compute that neither come before ``transfer`` nor wait for it."""
    seen = {transfer}
    for stack, step in (([transfer], lambda i: graph.tasks[i].needs), ([transfer], lambda i: graph.users[i])):
        while stack:
            for i in step(stack.pop()):
                if i not in seen:
                    seen.add(i)
                    stack.append(i)
    return max(graph.busy()[COMPUTE] - sum(graph.tasks[i].seconds for i in seen if graph.tasks[i].resource == COMPUTE), 0.0)


def hidden(timeline: Timeline, transfer: int) -> bool:
    """True when at most :data:`HIDDEN` of the transfer's time is exposed."""
    return timeline.exposed.get(transfer, 0.0) <= HIDDEN * timeline.graph.tasks[transfer].seconds


def hideable(graph: TaskGraph) -> list[int]:
    """Transfers with at least their own time of independent compute: the others cannot be hidden by any order."""
    return [i for i in graph.transfers if graph.tasks[i].seconds > 0 and independent_seconds(graph, i) >= graph.tasks[i].seconds]


def reasons(timeline: Timeline, unlimited: Timeline | None = None) -> dict[int, str]:
    """Exposed transfer -> why.

    Args:
        timeline: the schedule.
        unlimited: what the same scheduler does when memory does not count; None when memory was not limited.
    """
    graph = timeline.graph
    exposed = sorted((i for i in timeline.exposed if not hidden(timeline, i)), key=lambda i: (-timeline.exposed[i], i))
    return {i: f"{_ms(timeline.exposed[i])} of {_ms(graph.tasks[i].seconds)} exposed: {_why(timeline, unlimited, i, rank < EXAMINED)}" for rank, i in enumerate(exposed)}


def _why(timeline: Timeline, unlimited: Timeline | None, i: int, examine: bool) -> str:
    graph, task = timeline.graph, timeline.graph.tasks[i]
    if examine:
        independent = independent_seconds(graph, i)
        if independent <= 1e-9:
            return "no independent work; all other compute comes before it or needs its result"
        if unlimited is not None and unlimited.exposed.get(i, 0.0) < 0.5 * timeline.exposed[i]:
            return f"memory allowance; hidden with {(unlimited.peak - timeline.peak) / 2**20:.1f} MiB more (option overlap_memory)"
        if independent < task.seconds:
            return f"only {_ms(independent)} of independent work in the graph"
    ahead = [j for j in timeline.order if graph.tasks[j].resource == task.resource and timeline.end[j] == timeline.start[i] and j != i]
    busy = graph.busy()
    if busy[task.resource] > busy[COMPUTE]:
        return f"communication bound; link {task.resource} needs {_ms(busy[task.resource])} and there is {_ms(busy[COMPUTE])} of compute"
    ready = max((timeline.end[n] for n in task.needs), default=0.0)
    if ahead and timeline.start[i] > ready:
        return f"order on link {task.resource}; {graph.tasks[ahead[-1]].name} was in front of it"
    return "its independent work comes too late, or hides other collectives"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
