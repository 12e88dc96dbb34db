"""Active schedules of the stretches between points that no transfer passes (bounds.py), each searched by itself.

A list scheduler never lets a link idle while a transfer is ready, though a shorter one that is ready soon may be more
urgent. An active schedule puts each task, in the order of a priority, into the first gap of its resource that it fits
into; one of them is optimal. Justified from the end and from the begin in turn (Li and Willis 1992), with priorities
changed at random near the best. Stretches that are alike, as layers are, are searched once. Memory is checked when an
order is shorter; one that needs too much is passed over.
"""

from __future__ import annotations

import functools
import random
from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import Callable, Sequence

import numpy as np

from mindspeed_fx.passes.overlap.model import bounds
from mindspeed_fx.passes.overlap.model.simulator import memory_curve, simulate
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Task, TaskGraph

SMALLEST = 8
"""Tasks that a stretch must have: fewer leave nothing to choose."""
STALE = 60_000
"""Tasks placed, or STALE_ORDERS for each task where that is more, before a search ends because no order was shorter: a
quarter less time for all together than without (benchmarks/results/2026-11-25-overlap_search.txt)."""
STALE_ORDERS = 100
KEPT = 4
"""Orders kept of a stretch, for others like it that have less memory (as in 2026-11-22-overlap_graphs.txt)."""


def by_stretches(graph: TaskGraph, order: Sequence[int], limit: int | None, work: int) -> list[int]:
    """``order`` with each stretch between two points in the best order found for it.

    Args:
        limit: bytes that the order must not exceed; None: no limit.
        work: tasks that all searches together may place.
    """
    order = list(order)
    if len(graph) * len(graph.transfers) > bounds.WIDE or not graph.transfers:
        return order
    points = set(bounds.points(graph))
    at = [-1, *(k for k, i in enumerate(order) if i in points), len(order)]
    stretches = [
        (a + 1, b)
        for a, b in zip(at, at[1:])
        if b - a > SMALLEST and any(not graph.tasks[i].computes for i in order[a + 1 : b])
    ]
    alike: dict[tuple, list[tuple[int, int]]] = {}
    for first, end in stretches:
        alike.setdefault(_key(graph, sorted(order[first:end])), []).append((first, end))
    for same in alike.values():
        result: list[list[int]] | None = None
        for first, end in same:
            tasks = sorted(order[first:end])
            place = {i: k for k, i in enumerate(tasks)}
            stretch = _part(graph, tasks, place)
            now = simulate(stretch, [place[i] for i in order[first:end]], memory=False).seconds
            if result is None:
                result = _search(
                    stretch,
                    [place[i] for i in order[first:end]],
                    now,
                    functools.partial(_fits, graph, order, first, tasks, limit) if limit is not None else None,
                    work // len(alike),
                )
            for o in result:
                if simulate(stretch, o, memory=False).seconds < now and (
                    limit is None or _fits(graph, order, first, tasks, limit, o)
                ):
                    order[first:end] = [tasks[k] for k in o]
                    break
    return order


def _fits(graph: TaskGraph, order: list[int], first: int, tasks: list[int], limit: int, part: list[int]) -> bool:
    """Whether ``order``, with these tasks from its place ``first`` on in the order ``part``, stays within ``limit``
    bytes.
    """
    return max(memory_curve(graph, [*order[:first], *(tasks[k] for k in part), *order[first + len(part) :]])) <= limit


def _key(graph: TaskGraph, tasks: list[int]) -> tuple:
    """Equal for stretches that are alike; times to a thousandth, for caches are a little warmer here and there."""
    place = {i: k for k, i in enumerate(tasks)}
    return tuple(
        (f"{t.seconds:.2e}", t.resource, tuple(place[n] for n in t.needs if n in place))
        for t in (graph.tasks[i] for i in tasks)
    )


def _part(graph: TaskGraph, tasks: list[int], place: dict[int, int]) -> TaskGraph:
    return TaskGraph(
        [
            Task(t.name, t.seconds, t.resource, tuple(place[n] for n in t.needs if n in place))
            for t in (graph.tasks[i] for i in tasks)
        ]
    )


def _search(
    graph: TaskGraph, order: list[int], seconds: float, fits: Callable[[list[int]], bool] | None, work: int
) -> list[list[int]]:
    """Orders shorter than ``order``, the shortest first."""
    size, least = len(graph), graph.highest_bound
    ahead, back = _Side(graph, False), _Side(graph, True)
    best, kept, dice, remaining = seconds, [], random.Random(0), max(work // size, 1)
    patience = max(STALE // size, STALE_ORDERS)
    stale = remaining - patience
    keys = simulate(graph, order, memory=False).start
    movable = [i for i, t in enumerate(graph.tasks) if t.seconds > 0]
    trial = [-t for t in graph.alap_lengths]
    while remaining > max(stale, 0) and best > least * (1 + 1e-4):
        last = float("inf")
        while remaining > 0:
            starts, now = ahead.placed(trial)
            remaining -= 2
            if now >= last * (1 - 1e-12):
                break
            last, result = now, starts
            turned, _ = back.placed([-(s + t.seconds) for s, t in zip(starts, graph.tasks)])
            trial = [-(s + t.seconds) for s, t in zip(turned, graph.tasks)]
        if last < best * (1 - 1e-9):
            output = _order(graph, result)
            now = simulate(graph, output, memory=False).seconds
            if now < best and (fits is None or fits(output)):
                best, keys, stale = now, result, remaining - patience
                kept.insert(0, output)
        elif kept and last <= best * (1 + 1e-9) and fits is None:
            keys = result
        if dice.random() < 0.5:
            trial = list(keys)
            for _ in range(dice.choice((1, 2, 3, 5))):
                trial[dice.choice(movable)] = keys[dice.choice(movable)]
        else:
            noise = dice.choice((0.02, 0.1, 0.3)) * best
            trial = [k + noise * (dice.random() - 0.5) for k in keys]
    return kept[:KEPT]


class _Side:
    """A task graph seen from its begin, or from its end."""

    def __init__(self, graph: TaskGraph, back: bool):
        needs = [t.needs for t in graph.tasks]
        self.users = needs if back else graph.users
        self.missing = [len(n) for n in (graph.users if back else needs)]
        self.seconds = [t.seconds for t in graph.tasks]
        number = {r: k for k, r in enumerate([COMPUTE, *graph.links])}
        self.resource = [number[t.resource] for t in graph.tasks]
        self.resources = len(number)

    def placed(self, keys: Sequence[float]) -> tuple[list[float], float]:
        """Start of each task in the active schedule of these priorities (smaller first), and its length."""
        missing, seconds, resource, users = list(self.missing), self.seconds, self.resource, self.users
        by_rank = np.argsort(np.array(keys), kind="stable").tolist()  # heaps of numbers are faster than of pairs
        rank = [0] * len(missing)
        for k, i in enumerate(by_rank):
            rank[i] = k
        heap = [rank[i] for i, n in enumerate(missing) if not n]
        heapify(heap)
        start, ready, longest = [0.0] * len(missing), [0.0] * len(missing), 0.0
        busy: list[list[tuple[float, float]]] = [[] for _ in range(self.resources)]
        while heap:
            i = by_rank[heappop(heap)]
            t, d = ready[i], seconds[i]
            if d > 0:
                taken = busy[resource[i]]
                if taken and taken[-1][1] > t:
                    k = bisect_left(taken, (t,))
                    if k and taken[k - 1][1] > t:
                        t = taken[k - 1][1]
                    while k < len(taken) and taken[k][0] < t + d - 1e-15:
                        t = taken[k][1]
                        k += 1
                    taken.insert(k, (t, t + d))
                else:
                    taken.append((t, t + d))
            start[i] = t
            t += d
            if t > longest:
                longest = t
            for u in users[i]:
                if t > ready[u]:
                    ready[u] = t
                missing[u] -= 1
                if not missing[u]:
                    heappush(heap, rank[u])
        return start, longest


def _order(graph: TaskGraph, start: Sequence[float]) -> list[int]:
    """The order in which a program issues tasks that start so: a transfer before the compute that runs when it starts;
    what takes no time before what needs it.
    """
    tasks = graph.tasks
    computes = sorted((i for i, t in enumerate(tasks) if t.computes and t.seconds > 0), key=lambda i: (start[i], i))
    ends = [start[i] + tasks[i].seconds for i in computes]
    rank = {i: k for k, i in enumerate(computes)}
    before = [len(computes)] * len(tasks)  # issued before the compute of this rank
    for i in range(len(tasks) - 1, -1, -1):
        if i in rank:
            before[i] = rank[i]
            continue
        before[i] = min((before[u] for u in graph.users[i]), default=len(computes))
        if not tasks[i].computes:
            before[i] = min(before[i], bisect_left(ends, start[i] + 1e-15 + 1e-12 * start[i]))
    return sorted(range(len(tasks)), key=lambda i: (before[i], i in rank, 0.0 if i in rank else start[i], i))
