"""An fx graph as a task graph, and an order of tasks back as an order of nodes.

Besides data, an order must respect what the graph's text alone shows: writes in place come after the reads before them,
random numbers are drawn in the order they were, effects happen in the order they did. These are needs of tasks here, so
every order that the scheduler may choose is bitwise neutral.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.graph.collectives import group_of, is_start, is_wait, kind
from mindspeed_fx.graph.liveness import Walk
from mindspeed_fx.graph.op_sets import is_random
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.storage import is_view
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Buffer, Task, TaskGraph

LARGE = 12_000
"""Nodes from which passes hand on the order that they have found (benchmarks/results/2026-11-22-overlap_time.txt)."""
CostOf = Callable[[fx.Node], tuple[float, str]]
"""Seconds of a node, and the link it uses ("" for compute)."""


@dataclass
class GraphTasks:
    """A task graph and the node behind each task."""

    gm: fx.GraphModule
    nodes: list[fx.Node]
    tasks: TaskGraph

    def apply(self, order: Sequence[int]) -> None:
        """Put the nodes of the graph into this order of tasks."""
        self.tasks.check_order(order)
        graph = self.gm.graph
        output = next(n for n in reversed(graph.nodes) if n.op == "output")
        for node in [n for n in graph.nodes if n.op in ("placeholder", "get_attr")]:
            output.prepend(node)
        for i in order:
            output.prepend(self.nodes[i])
        recompile(self.gm)


def tasks_of(gm: fx.GraphModule, cost: CostOf, *, owned: Callable[[fx.Node], bool] | None = None) -> GraphTasks:
    """The task graph of ``gm``.

    Args:
        cost: seconds and link of each node; waits and views are not asked.
        owned: True for placeholders whose memory the graph may free (saved activations); default: none.
    """
    builder = _Builder(owned or (lambda node: False))
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    number = {n: i for i, n in enumerate(nodes)}
    tasks = []
    for node in gm.graph.nodes:
        if node.op == "output":
            builder.keep(node)
        elif node not in number:
            builder.input(node)
        else:
            i = number[node]
            needs = builder.visit(i, node)
            needs.update(number[a] for a in node.all_input_nodes if a in number)
            needs.discard(i)
            needs = tuple(sorted(needs))
            if is_start(node):
                seconds, link = cost(node)
                tasks.append(Task(node.name, float(seconds), link or group_of(node), needs, group_of(node), kind(node)))
            elif is_wait(node):
                tasks.append(Task(node.name, 0.0, COMPUTE, needs, kind="wait"))
            else:
                tasks.append(Task(node.name, 0.0 if _is_free(node) else float(cost(node)[0]), COMPUTE, needs))
    return GraphTasks(gm, nodes, TaskGraph(tasks, builder.finished()))


def cached_tasks(
    gm: fx.GraphModule, context: Context | None, cost: Callable[[], CostOf], owned: Callable[[fx.Node], bool] | None
) -> GraphTasks:
    """:func:`tasks_of`, once for all passes of this family where a graph has not changed between them, with what
    searches have found of it.

    Args:
        context: keeps the tasks for the next pass; None of a copy, which no other pass sees.
    """
    if context is None:
        return tasks_of(gm, cost(), owned=owned)
    now = [(n, n.target, n.args, n.kwargs) for n in gm.graph.nodes]
    before, result = context.overlap.tasks
    if before != now:
        result = tasks_of(gm, cost(), owned=owned)
    context.overlap.tasks = (now, result)
    return result


def saved_activation(node: fx.Node) -> bool:
    """True for a backward graph's placeholder that nothing else holds: not a parameter or input of the forward. (Both
    code paths hand saved values to the backward in a list that is emptied as they are read.)"""
    return not node.name.startswith("primals")


def _is_free(node: fx.Node) -> bool:
    """Takes no time: a view, or one of several results."""
    return node.target is operator.getitem or is_view(node)


@dataclass
class _Memory:
    made_by: int
    bytes: int
    kept: bool = False
    users: set[int] = field(default_factory=set)
    writer: int = -1
    """Last task that wrote it in place."""
    readers: set[int] = field(default_factory=set)
    """Tasks that read it since."""


class _Builder:
    """Follows memories and effects through the graph in order."""

    def __init__(self, owned: Callable[[fx.Node], bool]):
        self.owned = owned
        self.walk = Walk()
        self.memories: list[_Memory] = []
        self.effect = -1
        self.effects: dict[int, bool] = {}  # by identity of what is called

    def input(self, node: fx.Node) -> None:
        kept = node.op == "get_attr" or not self.owned(node)
        self.walk.visit(node)
        self._note(-1)
        for m in self.walk.memories.of[node]:  # a view of a parameter may be saved beside the parameter
            self.memories[m].kept |= kept

    def keep(self, output: fx.Node) -> None:
        for m in self.walk.memories.behind(output.all_input_nodes):
            self.memories[m].kept = True

    def finished(self) -> list[Buffer]:
        return [
            Buffer(m.made_by, m.bytes, tuple(sorted(m.users - {m.made_by})), m.kept)
            for m in self.memories
            if m.bytes and not (m.kept and m.made_by < 0)
        ]

    def visit(self, i: int, node: fx.Node) -> set[int]:
        """Order needs of a task beyond its data; notes what it reads, writes and makes."""
        access, needs = self.walk.visit(node), set()
        for m in access.reads:
            memory = self.memories[m]
            memory.users.add(i)
            if memory.writer >= 0:
                needs.add(memory.writer)
            if m in access.writes:
                needs |= memory.readers
                memory.writer, memory.readers = i, set()
            else:
                memory.readers.add(i)
        if self._has_effect(node):
            if self.effect >= 0:
                needs.add(self.effect)
            self.effect = i
        self._note(i)
        return needs

    def _note(self, i: int) -> None:
        """What the last node made."""
        self.memories += [_Memory(i, size) for size in self.walk.memories.bytes[len(self.memories) :]]

    def _has_effect(self, node: fx.Node) -> bool:
        """Must stay in order with others of its kind: draws random numbers, checks, prints, or is opaque."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return isinstance(target, torch._ops.HigherOrderOperator) or node.op in ("call_module", "call_method")
        if id(target) not in self.effects:  # an operator's arguments do not matter
            self.effects[id(target)] = not (is_start(node) or is_wait(node)) and (
                is_random(target) or (node.is_impure() and not target._schema.is_mutable)
            )
        return self.effects[id(target)]
