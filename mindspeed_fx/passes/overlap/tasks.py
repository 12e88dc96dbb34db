"""What the scheduler and the simulator see: tasks that take time on a resource, and buffers that live between them.

A task runs on the compute stream or starts a transfer on a link. Tasks are issued in one order, as a program does:
compute tasks run one after another in that order; a transfer is queued on its link when it is issued and starts no
earlier than the compute issued before it is done. What needs a transfer's result first has a wait, a compute task of no
time. Every disjunctive schedule of one compute machine and the links has such an order, so nothing is lost by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Iterable, Sequence

COMPUTE = "compute"


@dataclass(frozen=True)
class Task:
    """One node of the graph.

    Args:
        name: unique; shown in timelines.
        seconds: how long it takes.
        resource: :data:`COMPUTE`, or the link that a transfer occupies.
        needs: indices of tasks that must be done first; a task that needs a transfer waits for its end.
        group: process group of a collective; "" for compute.
        kind: "compute", "wait", or the collective's operator.
    """

    name: str
    seconds: float
    resource: str = COMPUTE
    needs: tuple[int, ...] = ()
    group: str = ""
    kind: str = "compute"


@dataclass(frozen=True)
class Buffer:
    """Memory that is allocated when ``made_by`` is issued (-1: there from the start) and freed after the last of ``users``.

    Args:
        bytes: size.
        users: tasks that read or write it, the maker left out. The wait of a transfer uses the transfer's input.
        kept: an output of the graph, or memory that belongs to the caller: never freed.
    """

    made_by: int
    bytes: int
    users: tuple[int, ...] = ()
    kept: bool = False


@dataclass
class TaskGraph:
    """Tasks in an order that can run (the order of the program as it was given), and the buffers between them.

    Raises:
        ValueError: a task needs one that comes later, or takes negative time.
    """

    tasks: Sequence[Task]
    buffers: Sequence[Buffer] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for i, task in enumerate(self.tasks):
            if task.seconds < 0:
                raise ValueError(f'task "{task.name}" takes {task.seconds} seconds')
            if task.needs and max(task.needs) >= i:
                raise ValueError(f'task "{task.name}" needs "{self.tasks[max(task.needs)].name}", which comes later')

    def __len__(self) -> int:
        return len(self.tasks)

    @cached_property
    def users(self) -> list[list[int]]:
        """Tasks that need each task."""
        users: list[list[int]] = [[] for _ in self.tasks]
        for i, task in enumerate(self.tasks):
            for need in task.needs:
                users[need].append(i)
        return users

    @cached_property
    def links(self) -> list[str]:
        """Every resource but compute, by name."""
        return sorted({t.resource for t in self.tasks} - {COMPUTE})

    @cached_property
    def transfers(self) -> list[int]:
        """Indices of the tasks on links."""
        return [i for i, t in enumerate(self.tasks) if t.resource != COMPUTE]

    @cached_property
    def tails(self) -> list[float]:
        """Longest path from the start of each task to the end of the graph, in seconds."""
        tails = [0.0] * len(self.tasks)
        for i in range(len(self.tasks) - 1, -1, -1):
            tails[i] = self.tasks[i].seconds + max((tails[u] for u in self.users[i]), default=0.0)
        return tails

    @cached_property
    def heads(self) -> list[float]:
        """Longest path from the start of the graph to the start of each task, in seconds."""
        heads = [0.0] * len(self.tasks)
        for i, task in enumerate(self.tasks):
            heads[i] = max((heads[n] + self.tasks[n].seconds for n in task.needs), default=0.0)
        return heads

    def busy(self) -> dict[str, float]:
        """Seconds of work per resource."""
        return dict(self._busy)

    @cached_property
    def _busy(self) -> dict[str, float]:
        total = {COMPUTE: 0.0, **dict.fromkeys(self.links, 0.0)}
        for task in self.tasks:
            total[task.resource] += task.seconds
        return total

    def bound(self) -> float:
        """No schedule is shorter: max(total compute, total per link, critical path), in seconds."""
        return max(max(self.busy().values()), max(self.tails, default=0.0))

    def machine_bound(self) -> float:
        """:attr:`highest_bound`, worked out once."""
        return self.highest_bound

    @cached_property
    def highest_bound(self) -> float:
        """A bound at least as high: for every resource, tasks cannot start before their head nor leave less than their
        tail behind them, even if they could be interrupted (Jackson's preemptive schedule, Carlier 1982)."""
        by_resource: dict[str, list[int]] = {}
        for i, task in enumerate(self.tasks):
            by_resource.setdefault(task.resource, []).append(i)
        return max([self.bound(), self.chain_bound(), *(self._preemptive(indices) for indices in by_resource.values())])

    def chain_bound(self) -> float:
        """A bound: the transfers of one chain, of which each needs the one before it, and the compute that none of them can hide.

        Compute that every transfer of the chain either needs or is needed by runs during none of them, and two tasks of the
        compute stream do not run at once; so the step takes at least the sum of all these. The chain is the longest by its transfers' time.
        """
        ahead, last = [0.0] * len(self), [-1] * len(self)  # seconds of the longest chain up to and with a task, and its last transfer
        before = {}  # transfer -> the one before it in that chain
        for i, task in enumerate(self.tasks):
            best = max(task.needs, key=ahead.__getitem__, default=None)
            if best is not None:
                ahead[i], last[i] = ahead[best], last[best]
            if task.resource != COMPUTE:
                before[i], last[i] = last[i], i
                ahead[i] += task.seconds
        end = max(range(len(self)), key=ahead.__getitem__, default=None)
        chain = []
        at = last[end] if end is not None else -1
        while at >= 0:
            chain.append(at)
            at = before[at]
        place = {i: k for k, i in enumerate(reversed(chain))}
        done = [-1] * len(self)  # of the chain, the last transfer that a task needs
        for i, task in enumerate(self.tasks):
            done[i] = max((max(done[n], place.get(n, -1)) for n in task.needs), default=-1)
        due = [len(chain)] * len(self)  # and the first that needs it
        for i in range(len(self) - 1, -1, -1):
            due[i] = min((min(due[u], place.get(u, len(chain))) for u in self.users[i]), default=len(chain))
        return sum(self.tasks[i].seconds for i in chain) + sum(t.seconds for i, t in enumerate(self.tasks) if t.resource == COMPUTE and due[i] <= done[i] + 1)

    def _preemptive(self, indices: list[int]) -> float:
        import heapq

        pending = sorted((self.heads[i], i) for i in indices if self.tasks[i].seconds > 0)
        heap: list[tuple[float, int]] = []
        left = {i: self.tasks[i].seconds for _, i in pending}
        now, longest, at = 0.0, 0.0, 0
        while at < len(pending) or heap:
            if not heap:
                now = max(now, pending[at][0])
            while at < len(pending) and pending[at][0] <= now:
                i = pending[at][1]
                heapq.heappush(heap, (-(self.tails[i] - self.tasks[i].seconds), i))
                at += 1
            tail, i = heap[0]
            run = left[i] if at == len(pending) else min(left[i], pending[at][0] - now)
            now += run
            left[i] -= run
            if left[i] <= 1e-15:
                heapq.heappop(heap)
                longest = max(longest, now - tail)
        return longest

    def check_order(self, order: Iterable[int]) -> None:
        """Raise ValueError unless ``order`` has every task once and each after what it needs."""
        done: set[int] = set()
        for i in order:
            if i in done or not done.issuperset(self.tasks[i].needs):
                raise ValueError(f'task "{self.tasks[i].name}" is scheduled twice or before what it needs')
            done.add(i)
        if len(done) != len(self.tasks):
            raise ValueError(f"{len(self.tasks) - len(done)} tasks are not scheduled")
