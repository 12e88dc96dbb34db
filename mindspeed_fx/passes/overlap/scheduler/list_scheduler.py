"""List scheduling with look-ahead, in O(E log V) heap operations.

Time is followed as the order is made. At each step the compute stream takes the ready task with the smallest key;
before it runs, every link that will be free before it is done gets its most urgent ready transfer (look-ahead: a
transfer issued later would leave the link idle, one issued earlier would stand in the way of a more urgent one). Memory
is kept under a limit by :class:`~mindspeed_fx.passes.overlap.scheduler.memory_anchor.Anchor`.
"""

from __future__ import annotations

import heapq
from typing import Sequence

from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, TaskGraph
from mindspeed_fx.passes.overlap.scheduler.memory_anchor import Anchor

_TRIES = 6  # tasks of a queue that are asked for memory before the step gives up on that queue
_WIDE = 64  # and when nothing else can be done
_FITS = 16  # ready tasks looked at for one that fits in before a more urgent one
_REST = 4000  # a link that memory refused is asked again after one more task per so many tasks of the graph


def list_schedule(
    graph: TaskGraph,
    keys: Sequence[float],
    *,
    limit: int | None = None,
    patience: float = 0.0,
    expected: Sequence[float] | None = None,
    release: Sequence[float] | None = None,
) -> tuple[list[int], list[float]]:
    """An order of all tasks.

    Args:
        keys: smaller goes first; ties go by position.
        limit: bytes that are never exceeded (see Anchor).
        patience: how long, as a share of the task's own time, a ready task with a larger key is held back for one with
            a smaller key that waits for a running transfer. 0 never idles when something is ready.
        release: seconds of compute that must be issued before each transfer may start, unless nothing else can be done:
            what is gathered long before it is needed takes memory from what comes in between.
        expected: when each task is expected to be ready (from an earlier schedule); with it, links have patience too.

    Returns:
        The order, and the end time of each task by index.
    """
    tasks = graph.tasks
    users = graph.users
    missing = [len(set(t.needs)) for t in tasks]
    end, ready_at = [0.0] * len(tasks), [0.0] * len(tasks)
    anchor = Anchor(graph, limit)
    issued = anchor.issued  # what memory had issued out of turn stays in the heaps
    free = dict.fromkeys(graph.links, 0.0)
    ready: list[tuple[float, int]] = []  # compute that can run now
    later: list[tuple[float, float, int]] = []  # compute that waits for running transfers
    queued: dict[str, list[tuple[float, int]]] = {link: [] for link in graph.links}
    transfers = (
        {link: [i for i in graph.transfers if tasks[i].resource == link] for link in graph.links}
        if expected and patience
        else {}
    )
    asleep = dict.fromkeys(graph.links, 0)
    order: list[int] = []
    clock = progress = 0.0
    push, pop = heapq.heappush, heapq.heappop

    def available(i: int) -> None:
        task = tasks[i]
        if task.resource != COMPUTE:
            push(queued[task.resource], (keys[i], i))
        elif ready_at[i] > clock:
            push(later, (ready_at[i], keys[i], i))
        else:
            push(ready, (keys[i], i))

    def issue(i: int) -> None:
        nonlocal clock, progress
        task = tasks[i]
        begin = max(clock, ready_at[i])
        if task.resource == COMPUTE:
            end[i] = clock = begin + task.seconds
            progress += task.seconds
        else:
            end[i] = free[task.resource] = max(begin, free[task.resource]) + task.seconds
        anchor.issue(i)
        order.append(i)
        for user in users[i]:
            if end[i] > ready_at[user]:
                ready_at[user] = end[i]
            missing[user] -= 1
            if not missing[user]:
                available(user)

    def current(heap: list) -> list:
        """The heap, its first entry a task that is not yet issued."""
        while heap and issued[heap[0][-1]]:
            pop(heap)
        return heap

    def take(heap: list, width: int, held: Sequence[float] | None = None) -> tuple | None:
        """The first entry whose task memory allows (and ``held`` releases); up to ``width`` are asked."""
        passed = []
        found = None
        while heap and len(passed) < width:
            entry = pop(heap)
            if issued[entry[-1]]:
                continue
            if (held is None or held[entry[-1]] <= progress) and anchor.allowed(entry[-1]):
                found = entry
                break
            passed.append(entry)
        for entry in passed:
            push(heap, entry)
        return found

    def fitting(window: float) -> int | None:
        """A ready task that is done within ``window``; the first by key of those looked at."""
        passed, found = [], None
        while ready and len(passed) < _FITS:
            entry = pop(ready)
            if issued[entry[1]]:
                continue
            if 0 < tasks[entry[1]].seconds <= window and anchor.allowed(entry[1]):
                found = entry[1]
                break
            passed.append(entry)
        for entry in passed:
            push(ready, entry)
        return found

    def held_back(entry: tuple[float, int]) -> bool:
        """Is a more urgent transfer expected on the same link so soon that this one should let it pass?"""
        key, i = entry
        link = tasks[i].resource
        latest = max(clock, free[link]) + patience * tasks[i].seconds
        return any(keys[j] < key and missing[j] and expected[j] <= latest for j in transfers[link])

    def feed(until: float, hold: bool = True) -> bool:
        """Give every link that is free before ``until`` its next transfers."""
        fed = False
        for link, heap in queued.items():
            while current(heap) and len(order) >= asleep[link] and (free[link] < until or free[link] <= clock):
                entry = take(heap, _TRIES, release if hold else None)
                if entry is None:
                    asleep[link] = len(order) + 1 + len(tasks) // _REST
                    break
                if hold and transfers and held_back(entry):
                    push(heap, entry)
                    break
                issue(entry[-1])
                fed = True
        return fed

    for i, count in enumerate(missing):
        if not count:
            available(i)
    while len(order) < len(tasks):
        while current(later) and later[0][0] <= clock:
            _, key, i = pop(later)
            push(ready, (key, i))
        entry = take(ready, _TRIES)
        if entry is not None:
            key, i = entry
            seconds = tasks[i].seconds
            if patience and seconds and feed(clock):
                push(ready, entry)
                continue
            if patience and later and seconds:
                better = min((e for e in later if not issued[e[2]]), key=lambda e: e[1])
                window = better[0] - clock
                if better[1] < key and window < seconds and (filler := fitting(window)) is not None:
                    push(ready, entry)
                    issue(filler)
                    continue
                if better[1] < key and window <= patience * seconds and anchor.allowed(better[2]):
                    push(ready, entry)
                    if not feed(better[0]):
                        later.remove(better)
                        heapq.heapify(later)
                        issue(better[2])
                    continue
            if seconds and feed(clock + seconds):  # may have made a better task ready
                push(ready, entry)
                continue
            issue(i)
            continue
        if feed(clock):
            continue
        entry = take(ready, _WIDE) if len(ready) > _TRIES else None  # memory is short: anything that it allows
        if entry is not None:
            issue(entry[-1])
            continue
        entry = take(later, _TRIES)
        if entry is not None:
            if feed(entry[0]):
                push(later, entry)
            else:
                issue(entry[-1])
            continue
        if (transfers or release) and feed(clock, hold=False):
            continue
        issue(anchor.first)  # memory allows nothing else: go on as the program was given
    return order, end
