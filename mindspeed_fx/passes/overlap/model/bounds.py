"""How short a step can be at best, whatever the order: bounds that know more than total compute, links and the critical
path.

Each is proven, none is always the highest, and the memory limit does not count. A share of communication "could be
hidden" is meant against the highest of them (:func:`mindspeed_fx.passes.overlap.model.reasons.share_hidden`).
"""

from __future__ import annotations

import heapq
from typing import Any, Sequence

TaskGraph = Any
"""A :class:`~mindspeed_fx.passes.overlap.model.tasks.TaskGraph`, which knows its bounds and so imports this file."""

WIDE = 40_000_000
"""Tasks times transfers up to which segments are looked for: it takes a bit for each."""
REACH = 6
"""Points that a segment may pass over: fewer segments have more work each that is known to lie in them."""


def highest(graph: "TaskGraph") -> float:
    """The highest of all bounds here, in seconds."""
    by_resource: dict[str, list[int]] = {}
    for i, task in enumerate(graph.tasks):
        by_resource.setdefault(task.resource, []).append(i)
    results = [
        graph.bound(),
        chain(graph),
        *(preemptive(graph, indices, graph.asap_lengths, graph.alap_lengths) for indices in by_resource.values()),
    ]
    return max(results) if len(graph) * len(graph.transfers) > WIDE else max(*results, segments(graph))


def preemptive(graph: "TaskGraph", indices: Sequence[int], heads: Sequence[float], alap: Sequence[float]) -> float:
    """A bound from the tasks of one resource: none starts before its head, nor leaves less than its tail behind it,
    even if they could be interrupted (Jackson's preemptive schedule, Carlier 1982).

    Args:
        heads: seconds before each task can start. tails: seconds from its start to the end, its own included.
    """
    seconds = [graph.tasks[i].seconds for i in indices]
    pending = sorted((heads[i], k) for k, i in enumerate(indices) if seconds[k] > 0)
    heap: list[tuple[float, int]] = []
    remaining = list(seconds)
    now, longest, at = 0.0, 0.0, 0
    while at < len(pending) or heap:
        if not heap:
            now = max(now, pending[at][0])
        while at < len(pending) and pending[at][0] <= now:
            k = pending[at][1]
            heapq.heappush(heap, (-(alap[indices[k]] - seconds[k]), k))
            at += 1
        tail, k = heap[0]
        run = remaining[k] if at == len(pending) else min(remaining[k], pending[at][0] - now)
        now += run
        remaining[k] -= run
        if remaining[k] <= 1e-15:
            heapq.heappop(heap)
            longest = max(longest, now - tail)
    return longest


def chain(graph: "TaskGraph") -> float:
    """The transfers of one chain, of which each needs the one before it, and the compute that none of them can hide.

    Compute that every transfer of the chain either needs or is needed by runs during none of them, and two tasks of the
    compute stream do not run at once; so the step takes at least the sum of all these. The chain is the longest by its
    transfers' time.
    """
    size = len(graph)
    ahead, last = [0.0] * size, [-1] * size  # seconds of the longest chain up to and with a task, and its last transfer
    before = {}  # transfer -> the one before it in that chain
    for i, task in enumerate(graph.tasks):
        best = -1
        for n in task.needs:
            if best < 0 or ahead[n] > ahead[best]:
                best = n
        if best >= 0:
            ahead[i], last[i] = ahead[best], last[best]
        if not task.computes:
            before[i], last[i] = last[i], i
            ahead[i] += task.seconds
    end = max(range(size), key=ahead.__getitem__, default=None)
    links = []
    at = last[end] if end is not None else -1
    while at >= 0:
        links.append(at)
        at = before[at]
    place = {i: k for k, i in enumerate(reversed(links))}
    done, through = [-1] * size, [-1] * size  # of the chain, the last transfer that a task needs, and that with itself
    for i, task in enumerate(graph.tasks):
        latest = -1
        for n in task.needs:
            if through[n] > latest:
                latest = through[n]
        done[i], through[i] = latest, place.get(i, latest)
    due, until = [len(links)] * size, [len(links)] * size  # and the first that needs it
    for i in range(size - 1, -1, -1):
        first = len(links)
        for u in graph.users[i]:
            if until[u] < first:
                first = until[u]
        due[i], until[i] = first, place.get(i, first)
    return sum(graph.tasks[i].seconds for i in links) + sum(
        t.seconds for i, t in enumerate(graph.tasks) if t.computes and due[i] <= done[i] + 1
    )


def segments(graph: "TaskGraph") -> float:
    """Steps between points that no transfer passes, one after the other.

    A compute task that every transfer comes before or after (attention between chunks of sequence-parallel products)
    runs during none of them. What needs such a point and is needed by the next one lies between the two in time, and
    takes at least the bound of that part alone, in which the first chunk has nothing to run under yet and the last
    nothing any more. The points are those with the most work of each stretch without transfers; which of them are used
    is chosen so that the sum is highest.
    """
    result = points(graph)
    if not result:
        return 0.0
    ends = [-1, *result, len(graph)]
    best = [0.0] * len(ends)  # the highest bound of when a point ends
    for j in range(1, len(ends)):
        own = graph.tasks[ends[j]].seconds if ends[j] < len(graph) else 0.0
        best[j] = own + max(best[i] + _between(graph, ends[i], ends[j]) for i in range(max(j - REACH, 0), j))
    return best[-1]


def points(graph: "TaskGraph") -> list[int]:
    """Compute tasks that every transfer comes before or after, in order: of those between the same transfers the
    longest.
    """
    bit = {i: 1 << n for n, i in enumerate(graph.transfers)}
    everything = (1 << len(bit)) - 1
    size = len(graph)
    above, below = [0] * size, [0] * size
    for i, task in enumerate(graph.tasks):
        for n in task.needs:
            above[i] |= above[n] | bit.get(n, 0)
    for i in range(size - 1, -1, -1):
        for u in graph.users[i]:
            below[i] |= below[u] | bit.get(u, 0)
    longest: dict[int, int] = {}  # two points with other transfers before them have one between them
    for i, task in enumerate(graph.tasks):
        if task.computes and task.seconds > 0 and above[i] | below[i] == everything:
            if above[i] not in longest or graph.tasks[longest[above[i]]].seconds < task.seconds:
                longest[above[i]] = i
    return sorted(longest.values())


def _between(graph: "TaskGraph", first: int, last: int) -> float:
    """A bound from the tasks that need ``first`` and that ``last`` needs; -1 and the graph's size stand for its two
    ends.
    """
    tasks, inside = graph.tasks, range(first + 1, last)
    heads: dict[int, float] = {}
    for i in inside:
        known = [heads[n] + tasks[n].seconds for n in tasks[i].needs if n in heads]
        if known or first < 0 or first in tasks[i].needs:
            heads[i] = max(known, default=0.0)
    alap: dict[int, float] = {}
    for i in reversed(inside):
        if i in heads:
            known = [alap[u] for u in graph.users[i] if u in alap]
            if known or last == len(tasks) or last in graph.users[i]:
                alap[i] = tasks[i].seconds + max(known, default=0.0)
    by_resource: dict[str, list[int]] = {}
    for i in reversed(alap):
        by_resource.setdefault(tasks[i].resource, []).append(i)
    return max((preemptive(graph, indices, heads, alap) for indices in by_resource.values()), default=0.0)
