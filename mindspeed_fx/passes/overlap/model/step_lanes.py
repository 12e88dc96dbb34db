"""The modelled schedule of a final graph, for reports: its kernels as tasks in the order of the graph, collectives on
their links, and a wait where the graph has one."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.passes.overlap.model.reasons import reasons
from mindspeed_fx.passes.overlap.model.simulator import simulate
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Task, TaskGraph
from mindspeed_fx.report.lanes import STEP, Lanes
from mindspeed_fx.report.modelled import estimates
from mindspeed_fx.report.records import GraphRecord


def step_lanes(estimate: Any) -> Lanes:
    """The schedule of an estimated graph.

    Args:
        estimate: :class:`mindspeed_fx.cost.graph.Estimate`; every kernel of it is a task.
    """
    nodes, calls = estimate.nodes, estimate.calls
    place = {call.name: i for i, call in enumerate(calls.calls)}
    kernel_of = {name: k for k, n in enumerate(nodes) for name in (n.members or (n.name,))}
    waits = sorted(calls.waits)
    tasks: list[Task] = []
    task_of: dict[int, int] = {}  # kernel -> its task; waits are tasks too
    producer: dict[str, int] = {}  # key of memory -> task
    for k, node in enumerate(nodes):
        while waits and waits[0][0] <= place[node.name]:
            _wait(tasks, producer, waits.pop(0)[1])
        members = [calls.calls[place[name]] for name in (node.members or (node.name,)) if name in place]
        needs = {producer[s.key] for call in members for s in call.reads if s.key in producer}
        task_of[k] = len(tasks)
        kind = node.operator.rpartition(".")[2] if node.tier else "compute"
        tasks.append(Task(node.name, node.seconds, node.tier or COMPUTE, tuple(sorted(needs)), kind=kind))
        for call in members:
            if kernel_of.get(call.name) == k:
                producer |= {s.key: task_of[k] for s in call.writes}
    for _, key in waits:
        _wait(tasks, producer, key)
    graph = TaskGraph(tasks)
    timeline = simulate(graph, memory=False)
    names = (COMPUTE, *graph.links)
    kernel = {task: k for k, task in task_of.items()}
    return Lanes(
        names,
        tuple(names.index(tasks[task_of[k]].resource) for k in range(len(nodes))),
        tuple(timeline.start[task_of[k]] for k in range(len(nodes))),
        timeline.seconds,
        {kernel[i]: s for i, s in timeline.exposed.items() if i in kernel},
        {kernel[i]: why for i, why in reasons(timeline).items() if i in kernel},
    )


def record_lanes(record: GraphRecord, stage: str) -> None:
    """Keep the schedule of a final graph in ``record``, where hardware is known; nothing for other stages."""
    if stage in STEP and (estimate := estimates(record, stage).get(stage)) is not None:
        record.lanes[stage] = step_lanes(estimate)


def _wait(tasks: list[Task], producer: dict[str, int], key: str) -> None:
    """A wait for what makes ``key``; what reads it from here on needs no more."""
    if key in producer:
        tasks.append(Task(f"wait_{len(tasks)}", 0.0, COMPUTE, (producer[key],), kind="wait"))
