"""An order of tasks that needs little memory, for a graph whose order as written needs more than is allowed."""

from __future__ import annotations

from mindspeed_fx.passes.overlap.simulate import memory_curve
from mindspeed_fx.passes.overlap.tasks import Buffer, Task, TaskGraph


def frugal(graph: TaskGraph) -> list[int]:
    """Of the ready tasks that free at least what they make, the first as written; else the one that adds least for what it
    brings nearer to being freed. O(tasks x ready tasks)."""
    size = len(graph)
    missing = [len(set(t.needs)) for t in graph.tasks]
    made = [0] * size
    reads: list[list[int]] = [[] for _ in range(size)]
    left = []
    for n, b in enumerate(graph.buffers):
        if b.made_by >= 0:
            made[b.made_by] += b.bytes
        users = {b.made_by, *b.users} - {-1}
        left.append(len(users) + (size if b.kept else 0))
        for u in users:
            reads[u].append(n)
    ready = sorted(i for i, m in enumerate(missing) if not m)
    order: list[int] = []
    while ready:
        best, least = ready[0], None
        for i in ready:
            change = made[i] - sum(graph.buffers[n].bytes for n in reads[i] if left[n] == 1)
            if change <= 0:
                best = i
                break
            if least is None or change < least:
                best, least = i, change
        ready.remove(best)
        order.append(best)
        for n in reads[best]:
            left[n] -= 1
        for u in graph.users[best]:
            missing[u] -= 1
            if not missing[u]:
                ready.append(u)
        ready.sort()
    return order


def leaner(graph: TaskGraph, limit: int) -> list[int] | None:
    """The order as written where its peak is within ``limit`` bytes, else a frugal one; None when that is not either."""
    written = list(range(len(graph)))
    for order in (written, frugal(graph)):
        if max(memory_curve(graph, order), default=0) <= limit:
            return order
    return None


def reordered(graph: TaskGraph, order: list[int]) -> TaskGraph:
    """The same tasks, written in another order."""
    place = {i: k for k, i in enumerate(order)}
    moved = lambda i: place[i] if i >= 0 else -1
    tasks = [Task(t.name, t.seconds, t.resource, tuple(sorted(place[n] for n in t.needs)), t.group, t.kind) for t in (graph.tasks[i] for i in order)]
    return TaskGraph(tasks, [Buffer(moved(b.made_by), b.bytes, tuple(sorted(place[u] for u in b.users)), b.kept) for b in graph.buffers])
