"""An order of tasks that needs little memory, for a graph whose order as written needs more than is allowed."""

from __future__ import annotations

from heapq import heappop, heappush

from mindspeed_fx.passes.overlap.model.simulator import memory_curve
from mindspeed_fx.passes.overlap.model.tasks import Buffer, Task, TaskGraph


def min_memory_order(graph: TaskGraph) -> list[int]:
    """Of the ready tasks that free at least what they make, the first as written; else the one that adds least. O(E log
    V).
    """
    size = len(graph)
    missing = [len(set(t.needs)) for t in graph.tasks]
    change = [0] * size  # bytes that a task would add now; buffers only come closer to being freed, so that it falls
    reads: list[list[int]] = [[] for _ in range(size)]
    remaining = []
    for n, b in enumerate(graph.buffers):
        users = {b.made_by, *b.users} - {-1}
        remaining.append(users)
        if b.made_by >= 0:
            change[b.made_by] += b.bytes
        for u in users:
            reads[u].append(n)
        if len(users) == 1 and not b.kept:
            change[next(iter(users))] -= b.bytes
    done = [False] * size
    freeing: list[int] = []
    adding: list[tuple[int, int]] = []

    def enter(i: int) -> None:
        if change[i] <= 0:
            heappush(freeing, i)
        else:
            heappush(adding, (change[i], i))

    def taken() -> int | None:
        while freeing:
            if not done[i := heappop(freeing)]:
                return i
        while adding:
            known, i = heappop(adding)
            if not done[i] and known == change[i]:
                return i
        return None

    for i, m in enumerate(missing):
        if not m:
            enter(i)
    order: list[int] = []
    while (best := taken()) is not None:
        done[best] = True
        order.append(best)
        for n in reads[best]:
            remaining[n].discard(best)
            if len(remaining[n]) == 1 and not graph.buffers[n].kept:
                (last,) = remaining[n]
                change[last] -= graph.buffers[n].bytes
                if not missing[last]:
                    enter(last)
        for u in graph.users[best]:
            missing[u] -= 1
            if not missing[u]:
                enter(u)
    return order


def leaner(graph: TaskGraph, limit: int) -> list[int] | None:
    """The order as written where its peak is within ``limit`` bytes, else a frugal one; None when that is not
    either.
    """
    written = list(range(len(graph)))
    for order in (written, min_memory_order(graph)):
        if max(memory_curve(graph, order), default=0) <= limit:
            return order
    return None


def reorder(graph: TaskGraph, order: list[int]) -> TaskGraph:
    """The same tasks, written in another order."""
    place = {i: k for k, i in enumerate(order)}
    moved = lambda i: place[i] if i >= 0 else -1
    tasks = [
        Task(t.name, t.seconds, t.resource, tuple(sorted(place[n] for n in t.needs)), t.group, t.kind)
        for t in (graph.tasks[i] for i in order)
    ]
    return TaskGraph(
        tasks,
        [Buffer(moved(b.made_by), b.bytes, tuple(sorted(place[u] for u in b.users)), b.kept) for b in graph.buffers],
    )
