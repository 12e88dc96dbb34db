"""Room for error: a transfer that takes longer than the model thought should still cost nothing.

Starts are issued earlier than the link needs them, waits sunk to what needs them, as far as memory stays under the
limit.
Neither changes a simulated time: the transfers of a link keep their order, and a wait takes no time.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from mindspeed_fx.passes.overlap.model.simulator import memory_curve, simulate
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, TaskGraph

AHEAD = 1.0
"""A start is issued up to this many times its own duration before its link is free for it: a transfer may take twice
what the model says. Assumed; it moves no modelled time.
"""


def raise_starts(graph: TaskGraph, order: Sequence[int], limit: int | None) -> list[int]:
    """``order`` with every start moved up, not before what it needs nor past another start on its link."""
    tasks = graph.tasks
    timeline = simulate(graph, order, memory=False)
    place, clock, now = [0] * len(tasks), [], 0.0
    for k, i in enumerate(order):
        place[i] = k
        clock.append(now)  # when the program gets to place k
        if tasks[i].resource == COMPUTE:
            now = timeline.end[i]
    results = [0] * len(tasks)
    for buffer in graph.buffers:
        if buffer.made_by >= 0:
            results[buffer.made_by] += buffer.bytes
    curve = np.asarray(memory_curve(graph, order), dtype=np.int64)
    moved: dict[int, int] = {}  # start -> it now comes right before this place
    last = dict.fromkeys(graph.links, 0)
    for here, i in enumerate(order):
        task = tasks[i]
        if task.resource == COMPUTE:
            continue
        first = max([last[task.resource], *(place[n] + 1 if n not in moved else moved[n] for n in task.needs)])
        target = here
        while target > first and clock[target] > timeline.start[i] - AHEAD * task.seconds:
            target -= 1
        if limit is not None and results[i] and target < here:
            over = np.flatnonzero(curve[target:here] + results[i] > limit)
            target = target + int(over[-1]) + 1 if len(over) else target
        if target < here:
            curve[target:here] += results[i]
            moved[i] = target
        last[task.resource] = target if target < here else here + 1
    return sorted(order, key=lambda i: (moved.get(i, place[i]), i not in moved, place[i]))


def sink_waits(graph: TaskGraph, order: Sequence[int], limit: int | None) -> list[int]:
    """``order`` with every wait moved down to the task that needs it."""
    tasks, users = graph.tasks, graph.users
    place = [0] * len(tasks)
    for k, i in enumerate(order):
        place[i] = k
    holds: list[list[int]] = [[] for _ in tasks]  # wait -> buffers it keeps alive
    last = []  # buffer -> place of its last user
    curve = np.asarray(memory_curve(graph, order), dtype=np.int64)
    for n, buffer in enumerate(graph.buffers):
        last.append(max([place[u] for u in buffer.users] + [place[buffer.made_by] if buffer.made_by >= 0 else 0]))
        for u in buffer.users:
            if limit is not None and not buffer.kept and tasks[u].kind == "wait":
                holds[u].append(n)
    moved: dict[int, int] = {}  # wait -> it now comes right after this place
    for i in reversed(order):
        if tasks[i].kind != "wait":
            continue
        here = place[i]
        target = min((moved.get(u, place[u] - 1) for u in users[i]), default=len(order) - 1)
        if target <= here:
            continue
        held = np.zeros(target - here, dtype=np.int64)  # bytes added to the curve at here + 1 ... target
        for n in holds[i]:
            held[max(last[n] - here, 0) :] += graph.buffers[n].bytes
        if limit is not None:
            over = np.flatnonzero((curve[here + 1 : target + 1] + held > limit) & (held > 0))
            if len(over):
                target = here + int(over[0])
        if target > here:
            curve[here + 1 : target + 1] += held[: target - here]
            for n in holds[i]:
                last[n] = max(last[n], target)
            moved[i] = target
    return sorted(order, key=lambda i: (moved.get(i, place[i]), i in moved, place[i]))
