"""Buckets: which collectives can be one, and the task graph in which they are."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Hashable, Sequence

from mindspeed_fx.passes.overlap.model.tasks import Buffer, Task, TaskGraph


@dataclass(frozen=True)
class Candidate:
    """A collective that may share a bucket with others of the same key."""

    task: int
    key: Hashable
    bytes: int
    fixed: float
    """Seconds of its launch and latency, which a bucket pays once."""
    moving: float
    """Seconds of its bytes."""


def buckets(graph: TaskGraph, candidates: Sequence[Candidate], cap: int) -> list[list[Candidate]]:
    """Neighbours of one key that do not depend on each other, filled in program order up to ``cap`` bytes.

    The first bucket of a key takes a quarter of it: its transfer starts, or its first user can, that much earlier.
    """
    above = _collectives_above(graph)
    bit = {i: 1 << n for n, i in enumerate(graph.transfers)}
    done: list[list[Candidate]] = []
    open_: dict[Hashable, tuple[list[Candidate], int, int]] = {}  # members, their bits, their bytes
    started: set[Hashable] = set()
    for c in sorted(candidates, key=lambda c: c.task):
        members, mask, size = open_.get(c.key, ([], 0, 0))
        room = cap // 4 if c.key not in started else cap
        if members and (above[c.task] & mask or size + c.bytes > room):
            done.append(members)
            started.add(c.key)
            members, mask, size = [], 0, 0
        members.append(c)
        open_[c.key] = (members, mask | bit[c.task], size + c.bytes)
    done += [members for members, _, _ in open_.values()]
    return acyclic(graph, sorted((b for b in done if len(b) > 1), key=lambda b: b[0].task))


def merge_buckets(graph: TaskGraph, chosen: Sequence[Sequence[Candidate]]) -> tuple[TaskGraph, list[tuple[int, ...]]]:
    """The graph with each bucket as one transfer, in the stable topological order closest to the given one.

    Returns:
        The graph, and for each of its tasks the tasks it stands for.
    """
    home = list(range(len(graph)))  # task -> the task that leads its bucket
    for bucket in chosen:
        for c in bucket:
            home[c.task] = bucket[-1].task
    members: dict[int, list[int]] = {}
    for i, h in enumerate(home):
        members.setdefault(h, []).append(i)
    needs = {h: {home[n] for i in group for n in graph.tasks[i].needs} - {h} for h, group in members.items()}
    order = _topological_order(needs)
    place = {h: k for k, h in enumerate(order)}
    seconds = {b[-1].task: max(c.fixed for c in b) + sum(c.moving for c in b) for b in chosen}
    tasks = []
    for h in order:
        t = graph.tasks[h]
        tasks.append(
            Task(
                t.name,
                seconds.get(h, t.seconds),
                t.resource,
                tuple(sorted(place[n] for n in needs[h])),
                t.group,
                t.kind,
            )
        )
    buffers = [
        Buffer(
            place[home[b.made_by]] if b.made_by >= 0 else -1,
            b.bytes,
            tuple(sorted({place[home[u]] for u in b.users} - ({place[home[b.made_by]]} if b.made_by >= 0 else set()))),
            b.kept,
        )
        for b in graph.buffers
    ]
    return TaskGraph(tasks, buffers), [tuple(members[h]) for h in order]


def _topological_order(needs: dict[int, set[int]]) -> list[int]:
    """Topological order, smallest first; shorter than ``needs`` when they are circular."""
    users: dict[int, list[int]] = {h: [] for h in needs}
    missing = {h: len(n) for h, n in needs.items()}
    for h, n in needs.items():
        for m in n:
            users[m].append(h)
    ready = [h for h, m in missing.items() if not m]
    heapq.heapify(ready)
    order = []
    while ready:
        h = heapq.heappop(ready)
        order.append(h)
        for u in users[h]:
            missing[u] -= 1
            if not missing[u]:
                heapq.heappush(ready, u)
    return order


def acyclic(graph: TaskGraph, chosen: list[list[Candidate]]) -> list[list[Candidate]]:
    """Without the buckets that would have to wait for each other; the later ones give way."""
    home = list(range(len(graph)))
    for bucket in chosen:
        for c in bucket:
            home[c.task] = bucket[-1].task
    members: dict[int, list[int]] = {}
    for i, h in enumerate(home):
        members.setdefault(h, []).append(i)
    missing = dict.fromkeys(members, 0)  # needs of a bucket, or of a task alone, that are not done
    for i, task in enumerate(graph.tasks):
        missing[home[i]] += sum(home[n] != home[i] for n in task.needs)
    done: set[int] = set()

    def run(ready: list[int]) -> None:
        """Whatever can run once these can."""
        while ready:
            h = ready.pop()
            done.update(members[h])
            for u in (u for i in members[h] for u in graph.users[i] if home[u] != h):
                missing[home[u]] -= 1
                if not missing[home[u]]:
                    ready.append(home[u])

    run([h for h, m in missing.items() if not m])
    dropped = set()
    for bucket in sorted(chosen, key=lambda b: b[-1].task, reverse=True):
        last = bucket[-1].task
        if last in done:
            continue
        dropped.add(last)  # what is done stays done: without the bucket there is less to wait for
        alone = members.pop(last)
        for i in alone:
            home[i], members[i] = i, [i]
            missing[i] = sum(n not in done for n in graph.tasks[i].needs)
        run([i for i in alone if not missing[i]])
    return [b for b in chosen if b[-1].task not in dropped]


def _collectives_above(graph: TaskGraph) -> list[int]:
    """For each task the transfers it depends on, as bits in the order of ``graph.transfers``."""
    bit = {i: 1 << n for n, i in enumerate(graph.transfers)}
    above = [0] * len(graph)
    for i, task in enumerate(graph.tasks):
        for n in task.needs:
            above[i] |= above[n] | bit.get(n, 0)
    return above
