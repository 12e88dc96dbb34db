"""An fx graph as a task graph, and an order of tasks back as an order of nodes.

Besides data, an order must respect what the graph's text alone shows: writes in place come after the reads before them,
random numbers are drawn in the order they were, effects happen in the order they did. These are needs of tasks here, so
every order that the scheduler may choose is bitwise neutral.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from mindspeed_fx import compat
from mindspeed_fx.passes.overlap.collectives import group_of, is_start, is_wait, kind
from mindspeed_fx.passes.overlap.tasks import COMPUTE, Buffer, Task, TaskGraph

LARGE = 12_000
"""Nodes from which passes hand on what they have worked out."""
TASKS = "mindspeed_fx_overlap_tasks"
"""Key in ``gm.meta``: the nodes of a large graph with their arguments, and its tasks."""
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
        self.gm.recompile()


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
            needs = {number[a] for a in node.all_input_nodes if a in number} | builder.visit(i, node)
            needs.discard(i)
            start = is_start(node)
            free = is_wait(node) or builder.is_view(node)
            seconds, link = (0.0, "") if free else cost(node)
            tasks.append(
                Task(
                    node.name, float(seconds), (link or group_of(node)) if start else COMPUTE, tuple(sorted(needs)),
                    group_of(node) if start else "", kind(node) if start else "wait" if is_wait(node) else "compute",
                )  # fmt: skip
            )
    return GraphTasks(gm, nodes, TaskGraph(tasks, builder.finished()))


def priced(gm: fx.GraphModule, cost: Callable[[], CostOf], owned: Callable[[fx.Node], bool] | None) -> GraphTasks:
    """:func:`tasks_of`, once for all passes of this family where a graph is LARGE and has not changed between them."""
    if len(gm.graph.nodes) <= LARGE:
        return tasks_of(gm, cost(), owned=owned)
    now = [(n, n.target, n.args, n.kwargs) for n in gm.graph.nodes]
    before, made = gm.meta.pop(TASKS, (None, None))
    if before != now:
        made = tasks_of(gm, cost(), owned=owned)
    gm.meta[TASKS] = (now, made)
    return made


def aliases(gm: fx.GraphModule) -> dict[fx.Node, list[int]]:
    """Node -> numbers of the memories that its tensors lie in; nodes with a number in common share memory."""
    builder = _Builder(lambda node: False)
    for i, node in enumerate(gm.graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            builder.input(node)
        elif node.op != "output":
            builder.visit(i, node)
    return builder.of


def saved_activation(node: fx.Node) -> bool:
    """True for a backward graph's placeholder that nothing else holds: not a parameter or input of the forward. (Both
    code paths hand saved values to the backward in a list that is emptied as they are read.)"""
    return not node.name.startswith("primals")


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
    """Follows storages and effects through the graph in order."""

    def __init__(self, owned: Callable[[fx.Node], bool]):
        self.owned = owned
        self.memories: list[_Memory] = []
        self.of: dict[fx.Node, Any] = {}  # node -> memory of each of its tensors, in the order of tree_leaves
        self.stored: dict[int, int] = {}  # storage of an input -> its memory
        self.effect = -1
        self.read_by: dict[fx.Node, list[int]] = {}  # start -> memories that its transfer reads until it is waited for

    def input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        kept = node.op == "get_attr" or not self.owned(node)
        self.of[node] = []
        for v in tree_leaves(value):
            if isinstance(v, torch.Tensor):  # a view of a parameter may be saved beside the parameter
                m = self.stored.setdefault(compat.storage_of(v), len(self.memories))
                if m == len(self.memories):
                    self._new(-1, v, kept)
                self.memories[m].kept |= kept
                self.of[node].append(m)

    def keep(self, output: fx.Node) -> None:
        for node in output.all_input_nodes:
            for m in self.of.get(node, ()):
                self.memories[m].kept = True

    def finished(self) -> list[Buffer]:
        return [Buffer(m.made_by, m.bytes, tuple(sorted(m.users - {m.made_by})), m.kept) for m in self.memories if m.bytes and not (m.kept and m.made_by < 0)]

    def is_view(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return True
        made = self.of.get(node, ())
        return bool(made) and all(m in self._inputs(node) for m in made) and not self._written(node)

    def visit(self, i: int, node: fx.Node) -> set[int]:
        """Order needs of a task beyond its data; notes what it reads, writes and makes."""
        inputs, written = self._inputs(node), self._written(node)
        if is_wait(node):
            start = node.args[0]
            start = start if is_start(start) else getattr(start, "args", [start])[0]
            inputs = inputs | set(self.read_by.get(start, ()))
        needs = set()
        for m in inputs:
            memory = self.memories[m]
            memory.users.add(i)
            if memory.writer >= 0:
                needs.add(memory.writer)
            if m in written:
                needs |= memory.readers
                memory.writer, memory.readers = i, set()
            else:
                memory.readers.add(i)
        if _has_effect(node):
            if self.effect >= 0:
                needs.add(self.effect)
            self.effect = i
        self.of[node] = self._results(i, node)
        if is_start(node):
            self.read_by[node] = sorted(inputs)
        return needs

    def _inputs(self, node: fx.Node) -> set[int]:
        return {m for a in node.all_input_nodes for m in self.of.get(a, ())}

    def _written(self, node: fx.Node) -> set[int]:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            return set()
        return {m for a in self._arguments(node, write=True) for m in self.of.get(a, ())}

    def _arguments(self, node: fx.Node, *, write: bool) -> list[fx.Node]:
        """Nodes among the arguments that the schema marks as written, or as aliased by a result."""
        found = []
        for n, arg in enumerate(node.target._schema.arguments):
            if arg.alias_info is not None and (arg.alias_info.is_write or not write):
                value = node.args[n] if n < len(node.args) else node.kwargs.get(arg.name)
                found += [v for v in tree_leaves(value) if isinstance(v, fx.Node)]
        return found

    def _results(self, i: int, node: fx.Node) -> list[int]:
        value = node.meta.get("val")
        if is_wait(node):
            return list(self.of.get(node.args[0], ()))
        if node.target is operator.getitem:
            source = self.of.get(node.args[0], [])
            whole = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
            if isinstance(whole, (list, tuple)) and all(isinstance(v, torch.Tensor) or v is None for v in whole) and isinstance(node.args[1], int):
                at = sum(isinstance(v, torch.Tensor) for v in whole[: node.args[1] % len(whole)])
                return source[at : at + 1]
            return list(source)
        tensors = [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
        if isinstance(node.target, torch._ops.OpOverload) and any(r.alias_info is not None for r in node.target._schema.returns):
            aliased = [m for a in self._arguments(node, write=False) for m in self.of.get(a, ())]
            if aliased:
                return (aliased * len(tensors))[: len(tensors)]
        return [self._new(i, v, False) for v in tensors]

    def _new(self, i: int, value: torch.Tensor, kept: bool) -> int:
        size = value.element_size()
        for s in value.shape:
            size *= compat.hint(s)
        self.memories.append(_Memory(i, size, kept))
        return len(self.memories) - 1


def _has_effect(node: fx.Node) -> bool:
    """Must stay in order with others of its kind: draws random numbers, checks, prints, or is opaque."""
    if isinstance(node.target, torch._ops.OpOverload):
        if is_start(node) or is_wait(node):
            return False
        return torch.Tag.nondeterministic_seeded in node.target.tags or (node.is_impure() and not node.target._schema.is_mutable)
    return isinstance(node.target, torch._ops.HigherOrderOperator) or node.op in ("call_module", "call_method")
