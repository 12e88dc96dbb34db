"""Discrete-event simulation of a task graph in one order: times, exposed communication, memory. Deterministic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

import numpy as np

from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, TaskGraph


@dataclass
class Timeline:
    """What a run of a task graph in ``order`` looks like; seconds and bytes."""

    graph: TaskGraph
    order: list[int]
    start: list[float]
    """Start of each task, by index."""
    end: list[float]
    exposed: dict[int, float] = field(default_factory=dict)
    """Transfer -> seconds the compute stream stood still for it; only those above zero."""
    memory: list[int] = field(default_factory=list)
    """Bytes live while the k-th task of the order is issued."""

    @property
    def seconds(self) -> float:
        """Step time: when everything is done."""
        return max(self.end, default=0.0)

    @property
    def peak(self) -> int:
        """Largest number of bytes live at once."""
        return max(self.memory, default=0)

    @property
    def exposed_seconds(self) -> float:
        """Time in which communication ran and the compute stream stood still."""
        return sum(self.exposed.values())


def simulate(graph: TaskGraph, order: Sequence[int] | None = None, *, memory: bool = True) -> Timeline:
    """Run ``graph`` in ``order`` (default: as given).

    Args:
        memory: False leaves the memory curve out.

    Raises:
        ValueError: ``order`` is not a topological order of the tasks.
    """
    tasks = graph.tasks
    order = list(range(len(tasks))) if order is None else list(order)
    graph.check_order(order)
    start, end = [0.0] * len(tasks), [0.0] * len(tasks)
    timeline = Timeline(graph, order, start, end)
    clock, free = 0.0, dict.fromkeys(graph.links, 0.0)
    for i in order:
        task = tasks[i]
        ready, last = clock, -1
        for need in task.needs:
            if end[need] > ready:
                ready, last = end[need], need
        if task.resource == COMPUTE:
            if last >= 0:  # only a transfer can end later than the compute stream is free
                timeline.exposed[last] = timeline.exposed.get(last, 0.0) + ready - clock
            start[i] = ready
            end[i] = clock = ready + task.seconds
        else:
            start[i] = max(ready, free[task.resource])
            end[i] = free[task.resource] = start[i] + task.seconds
    running = sorted((end[i], i) for i in graph.transfers if end[i] > clock)
    for done, i in running:  # what nobody waits for still has to end
        timeline.exposed[i] = timeline.exposed.get(i, 0.0) + done - clock
        clock = done
    if memory:
        timeline.memory = memory_curve(graph, order)
    return timeline


def memory_curve(graph: TaskGraph, order: Sequence[int]) -> list[int]:
    """Bytes live while each task of ``order`` is issued: buffers from their maker until after their last user."""
    if not graph.buffers:
        return [0] * len(graph)
    bytes_, result, kept, used, starts = graph.memory
    place = graph.places(order)
    first = place[result]
    last = np.where(kept, len(graph) - 1, np.maximum.reduceat(place[used], starts))
    change = np.zeros(len(graph) + 1, dtype=np.int64)
    np.add.at(change, first, bytes_)
    np.add.at(change, last + 1, -bytes_)
    return np.cumsum(change)[: len(graph)].tolist()
