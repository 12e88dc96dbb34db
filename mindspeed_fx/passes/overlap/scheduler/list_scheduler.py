"""List scheduling with look-ahead, in O(E log V) heap operations.

Time is followed as the order is made. At each step the compute stream takes the ready task with the smallest key;
before it runs, every link that will be free before it is done gets its most urgent ready transfer (look-ahead: a
transfer issued later would leave the link idle, one issued earlier would stand in the way of a more urgent one). Memory
is kept under a limit by :class:`~mindspeed_fx.passes.overlap.scheduler.memory_anchor.Anchor`.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Sequence

from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, TaskGraph
from mindspeed_fx.passes.overlap.scheduler.memory_anchor import Anchor

# With these the times of benchmarks/results/2026-11-22-overlap_time.txt and the steps of overlap_simulated.txt there
# were measured.
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
    scheduler = _ListScheduler(graph, keys, limit, patience, expected, release)
    scheduler.run()
    return scheduler.order, scheduler.end


class _ListScheduler:
    """The order made so far, and the tasks that can come next; arguments as :func:`list_schedule`'s."""

    __slots__ = (
        "anchor",
        "asleep",
        "clock",
        "end",
        "expected",
        "free",
        "issued",
        "keys",
        "later",
        "missing",
        "order",
        "patience",
        "progress",
        "queued",
        "ready",
        "ready_at",
        "release",
        "tasks",
        "transfers",
        "users",
    )

    def __init__(
        self,
        graph: TaskGraph,
        keys: Sequence[float],
        limit: int | None,
        patience: float,
        expected: Sequence[float] | None,
        release: Sequence[float] | None,
    ):
        tasks = self.tasks = graph.tasks
        self.users, self.keys = graph.users, keys
        self.patience, self.expected, self.release = patience, expected, release
        self.missing = list(graph.needed)
        self.end, self.ready_at = [0.0] * len(tasks), [0.0] * len(tasks)
        self.anchor = Anchor(graph, limit)
        self.issued = self.anchor.issued  # what memory had issued out of turn stays in the heaps
        self.free = dict.fromkeys(graph.links, 0.0)
        self.ready: list[tuple[float, int]] = []  # compute that can run now
        self.later: list[tuple[float, float, int]] = []  # compute that waits for running transfers
        self.queued: dict[str, list[tuple[float, int]]] = {link: [] for link in graph.links}
        self.transfers = (
            {link: [i for i in graph.transfers if tasks[i].resource == link] for link in graph.links}
            if expected and patience
            else {}
        )
        self.asleep = dict.fromkeys(graph.links, 0)
        self.order: list[int] = []
        self.clock = self.progress = 0.0

    def run(self) -> None:
        """Issue every task."""
        for i, count in enumerate(self.missing):
            if not count:
                self.queue(i)
        size, ready, later = len(self.tasks), self.ready, self.later
        while len(self.order) < size:
            while self.current(later) and later[0][0] <= self.clock:
                _, key, i = heappop(later)
                heappush(ready, (key, i))
            entry = self.take(ready, _TRIES)
            if entry is not None:
                self.step(entry)
            else:
                self.step_without_ready()

    def step(self, entry: tuple[float, int]) -> None:
        """Run ``entry``, or put it back where something else comes first."""
        key, i = entry
        seconds = self.tasks[i].seconds
        if self.patience and seconds and self.feed(self.clock):
            heappush(self.ready, entry)
        elif self.patience and self.later and seconds and self.wait_for_better(entry):
            pass
        elif seconds and self.feed(self.clock + seconds):  # may have made a better task ready
            heappush(self.ready, entry)
        else:
            self.issue(i)

    def wait_for_better(self, entry: tuple[float, int]) -> bool:
        """Whether a more urgent task that waits for a transfer goes before ``entry``: what fits in until then is
        issued, or the compute stream idles.
        """
        key, i = entry
        later, seconds = self.later, self.tasks[i].seconds
        better = min((e for e in later if not self.issued[e[2]]), key=lambda e: e[1])
        window = better[0] - self.clock
        if better[1] < key and window < seconds and (filler := self.take_filler(window)) is not None:
            heappush(self.ready, entry)
            self.issue(filler)
            return True
        if better[1] < key and window <= self.patience * seconds and self.anchor.allowed(better[2]):
            heappush(self.ready, entry)
            if not self.feed(better[0]):
                later.remove(better)
                heapify(later)
                self.issue(better[2])
            return True
        return False

    def step_without_ready(self) -> None:
        """Go on where none of the ready tasks that were asked for may run."""
        if self.feed(self.clock):
            return
        # Memory is short: anything that it allows.
        entry = self.take(self.ready, _WIDE) if len(self.ready) > _TRIES else None
        if entry is not None:
            self.issue(entry[-1])
            return
        entry = self.take(self.later, _TRIES)
        if entry is not None:
            if self.feed(entry[0]):
                heappush(self.later, entry)
            else:
                self.issue(entry[-1])
            return
        if (self.transfers or self.release) and self.feed(self.clock, hold=False):
            return
        self.issue(self.anchor.first)  # memory allows nothing else: go on as the program was given

    def queue(self, i: int) -> None:
        """Put a task whose needs are all issued where it waits for its turn."""
        task = self.tasks[i]
        if task.resource != COMPUTE:
            heappush(self.queued[task.resource], (self.keys[i], i))
        elif self.ready_at[i] > self.clock:
            heappush(self.later, (self.ready_at[i], self.keys[i], i))
        else:
            heappush(self.ready, (self.keys[i], i))

    def issue(self, i: int) -> None:
        task, ready_at, missing = self.tasks[i], self.ready_at, self.missing
        begin = max(self.clock, ready_at[i])
        if task.resource == COMPUTE:
            end = self.clock = begin + task.seconds
            self.progress += task.seconds
        else:
            end = self.free[task.resource] = max(begin, self.free[task.resource]) + task.seconds
        self.end[i] = end
        self.anchor.issue(i)
        self.order.append(i)
        for user in self.users[i]:
            if end > ready_at[user]:
                ready_at[user] = end
            missing[user] -= 1
            if not missing[user]:
                self.queue(user)

    def current(self, heap: list) -> list:
        """The heap, its first entry a task that is not yet issued."""
        issued = self.issued
        while heap and issued[heap[0][-1]]:
            heappop(heap)
        return heap

    def take(self, heap: list, width: int, held: Sequence[float] | None = None) -> tuple | None:
        """The first entry whose task memory allows (and ``held`` releases); up to ``width`` are asked."""
        issued, allowed, progress = self.issued, self.anchor.allowed, self.progress
        passed = []
        result = None
        while heap and len(passed) < width:
            entry = heappop(heap)
            if issued[entry[-1]]:
                continue
            if (held is None or held[entry[-1]] <= progress) and allowed(entry[-1]):
                result = entry
                break
            passed.append(entry)
        for entry in passed:
            heappush(heap, entry)
        return result

    def take_filler(self, window: float) -> int | None:
        """A ready task that is done within ``window``; the first by key of those looked at."""
        ready, passed, result = self.ready, [], None
        while ready and len(passed) < _FITS:
            entry = heappop(ready)
            if self.issued[entry[1]]:
                continue
            if 0 < self.tasks[entry[1]].seconds <= window and self.anchor.allowed(entry[1]):
                result = entry[1]
                break
            passed.append(entry)
        for entry in passed:
            heappush(ready, entry)
        return result

    def is_held_back(self, entry: tuple[float, int]) -> bool:
        """Is a more urgent transfer expected on the same link so soon that this one should let it pass?"""
        key, i = entry
        keys, missing, expected, link = self.keys, self.missing, self.expected, self.tasks[i].resource
        latest = max(self.clock, self.free[link]) + self.patience * self.tasks[i].seconds
        return any(keys[j] < key and missing[j] and expected[j] <= latest for j in self.transfers[link])

    def feed(self, until: float, hold: bool = True) -> bool:
        """Give every link that is free before ``until`` its next transfers."""
        fed, free, order, asleep = False, self.free, self.order, self.asleep
        for link, heap in self.queued.items():
            while (
                self.current(heap) and len(order) >= asleep[link] and (free[link] < until or free[link] <= self.clock)
            ):
                entry = self.take(heap, _TRIES, self.release if hold else None)
                if entry is None:
                    asleep[link] = len(order) + 1 + len(self.tasks) // _REST
                    break
                if hold and self.transfers and self.is_held_back(entry):
                    heappush(heap, entry)
                    break
                self.issue(entry[-1])
                fed = True
        return fed
