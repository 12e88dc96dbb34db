"""What the scheduler and the simulator see: tasks that take time on a resource, and buffers that live between them.

A task runs on the compute stream or starts a transfer on a link. Tasks are issued in one order, as a program does:
compute tasks run one after another in that order; a transfer is queued on its link when it is issued and starts no
earlier than the compute issued before it is done. What needs a transfer's result first has a wait, a compute task of no
time. Every disjunctive schedule of one compute machine and the links has such an order, so nothing is lost by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, Hashable, Iterable, Sequence, TypeVar

import numpy as np

from mindspeed_fx.passes.overlap.model import bounds

COMPUTE = "compute"
Result = TypeVar("Result")


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

    @property
    def computes(self) -> bool:
        """True for what runs on the compute stream, False for a transfer."""
        return self.resource == COMPUTE


@dataclass(frozen=True)
class Buffer:
    """Memory that is allocated when ``made_by`` is issued (-1: there from the start) and freed after the last of
    ``users``.

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
    def alap_lengths(self) -> list[float]:
        """Longest path from the start of each task to the end of the graph, in seconds."""
        alap, users = [0.0] * len(self.tasks), self.users
        for i in range(len(self.tasks) - 1, -1, -1):
            longest = 0.0
            for u in users[i]:
                if alap[u] > longest:
                    longest = alap[u]
            alap[i] = self.tasks[i].seconds + longest
        return alap

    @cached_property
    def asap_lengths(self) -> list[float]:
        """Longest path from the start of the graph to the start of each task, in seconds."""
        heads = [0.0] * len(self.tasks)
        done = [0.0] * len(self.tasks)
        for i, task in enumerate(self.tasks):
            longest = 0.0
            for n in task.needs:
                if done[n] > longest:
                    longest = done[n]
            heads[i] = longest
            done[i] = longest + task.seconds
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
        return max(max(self.busy().values()), max(self.alap_lengths, default=0.0))

    @cached_property
    def highest_bound(self) -> float:
        """The highest bound that is known (see :mod:`bounds`), in seconds; at least :meth:`bound`."""
        return bounds.highest(self)

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Who is needed, and by whom."""
        return np.array([n for t in self.tasks for n in t.needs], dtype=np.int64), np.repeat(
            np.arange(len(self.tasks)), [len(t.needs) for t in self.tasks]
        )

    @cached_property
    def memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each buffer its bytes, its maker (:meth:`places` has a place for what is there from the start), whether it
        is kept; makers and users, one buffer after the other, and where each buffer's begin."""
        existing = len(self.tasks)
        results = [b.made_by if b.made_by >= 0 else existing for b in self.buffers]
        used = [u for b, m in zip(self.buffers, results) for u in (m, *b.users)]
        starts = np.cumsum([0, *(len(b.users) + 1 for b in self.buffers)])[:-1]
        integers = lambda row: np.array(row, dtype=np.int64)  # noqa: E731
        return (
            integers([b.bytes for b in self.buffers]),
            integers(results),
            np.array([b.kept for b in self.buffers], dtype=bool),
            integers(used),
            starts,
        )

    @cached_property
    def buffer_users(self) -> tuple[list[int], list[int], list[list[int]], list[list[int]]]:
        """Of each buffer its bytes; of each task the bytes that it makes, and the buffers that are freed one day of
        those that it makes or uses; of each buffer the tasks that make or use it, in order."""
        results, uses, users = [0] * len(self.tasks), [[] for _ in self.tasks], []
        for n, buffer in enumerate(self.buffers):
            users.append(sorted({buffer.made_by, *buffer.users} - {-1}))
            if buffer.made_by >= 0:
                results[buffer.made_by] += buffer.bytes
            if not buffer.kept and buffer.bytes:
                for i in users[-1]:
                    uses[i].append(n)
        return [b.bytes for b in self.buffers], results, uses, users

    @cached_property
    def needed(self) -> list[int]:
        """How many tasks each task needs."""
        return [len(set(t.needs)) for t in self.tasks]

    def remember(self, key: Hashable, work: Callable[[], Result]) -> Result:
        """What ``work`` returned when it was first asked for under ``key``, as long as the graph lives."""
        if key not in self._known:
            self._known[key] = work()
        return self._known[key]

    @cached_property
    def _known(self) -> dict[Hashable, Any]:
        return {}

    def places(self, order: Sequence[int]) -> np.ndarray:
        """Place of each task in ``order``; one more entry, 0, for what is there from the start."""
        place = np.zeros(len(self.tasks) + 1, dtype=np.int64)
        place[np.asarray(order, dtype=np.int64)] = np.arange(len(self.tasks))
        return place

    def check_order(self, order: Iterable[int]) -> None:
        """Raise ValueError unless ``order`` has every task once and each after what it needs."""
        order = list(order)
        if len(order) == len(self.tasks) and sorted(order) == list(range(len(order))):
            place, (needs, users) = self.places(order), self._edges
            if bool(np.all(place[needs] < place[users])):
                return
        done: set[int] = set()
        for i in order:
            if i in done or not done.issuperset(self.tasks[i].needs):
                raise ValueError(f'task "{self.tasks[i].name}" is scheduled twice or before what it needs')
            done.add(i)
        if len(done) != len(self.tasks):
            raise ValueError(f"{len(self.tasks) - len(done)} tasks are not scheduled")
