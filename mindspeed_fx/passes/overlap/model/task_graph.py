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

from mindspeed_fx.compat import fake
from mindspeed_fx.graph import memoize
from mindspeed_fx.graph.collectives import group_of, is_start, is_wait, kind
from mindspeed_fx.graph.recompile import no_gc, recompile
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE, Buffer, Task, TaskGraph

LARGE = 12_000
"""Nodes from which passes hand on what they have worked out."""
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
            sources = node.all_input_nodes
            read = builder.inputs(sources)
            needs = builder.visit(i, node, sources, read)
            needs.update(number[a] for a in sources if a in number)
            needs.discard(i)
            needs = tuple(sorted(needs))
            if is_start(node):
                seconds, link = cost(node)
                tasks.append(Task(node.name, float(seconds), link or group_of(node), needs, group_of(node), kind(node)))
            elif is_wait(node):
                tasks.append(Task(node.name, 0.0, COMPUTE, needs, kind="wait"))
            else:
                tasks.append(
                    Task(node.name, 0.0 if builder.is_view(node, read) else float(cost(node)[0]), COMPUTE, needs)
                )
    return GraphTasks(gm, nodes, TaskGraph(tasks, builder.finished()))


def priced(
    gm: fx.GraphModule, context: Context | None, cost: Callable[[], CostOf], owned: Callable[[fx.Node], bool] | None
) -> GraphTasks:
    """:func:`tasks_of`, once for all passes of this family where a graph is LARGE and has not changed between them.

    Args:
        context: keeps the tasks for the next pass; None of a copy, which no other pass sees.
    """
    if len(gm.graph.nodes) <= LARGE:
        return tasks_of(gm, cost(), owned=owned)
    now = [(n, n.target, n.args, n.kwargs) for n in gm.graph.nodes]
    before, made = context.overlap.tasks if context is not None else (None, None)
    if before != now:
        with no_gc(True):
            made = tasks_of(gm, cost(), owned=owned)
    if context is not None:
        context.overlap.tasks = (now, made)
    return made


def aliases(gm: fx.GraphModule) -> dict[fx.Node, list[int]]:
    """Node -> numbers of the memories that its tensors lie in; nodes with a number in common share memory."""
    builder = _Builder(lambda node: False)
    for i, node in enumerate(gm.graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            builder.input(node)
        elif node.op != "output":
            builder.visit(i, node, node.all_input_nodes, builder.inputs(node.all_input_nodes))
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
        self.effects: dict[int, bool] = {}  # by identity of what is called
        self.read_by: dict[fx.Node, list[int]] = {}  # start -> memories that its transfer reads until it is waited for

    def input(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        kept = node.op == "get_attr" or not self.owned(node)
        self.of[node] = []
        for v in tree_leaves(value):
            if isinstance(v, torch.Tensor):  # a view of a parameter may be saved beside the parameter
                m = self.stored.setdefault(fake.storage_of(v), len(self.memories))
                if m == len(self.memories):
                    self._new(-1, v, kept)
                self.memories[m].kept |= kept
                self.of[node].append(m)

    def keep(self, output: fx.Node) -> None:
        for node in output.all_input_nodes:
            for m in self.of.get(node, ()):
                self.memories[m].kept = True

    def finished(self) -> list[Buffer]:
        return [
            Buffer(m.made_by, m.bytes, tuple(sorted(m.users - {m.made_by})), m.kept)
            for m in self.memories
            if m.bytes and not (m.kept and m.made_by < 0)
        ]

    def is_view(self, node: fx.Node, read: set[int]) -> bool:
        if node.target is operator.getitem:
            return True
        made = self.of.get(node, ())
        return bool(made) and read.issuperset(made) and not self._written(node)

    def visit(self, i: int, node: fx.Node, sources: list[fx.Node], read: set[int]) -> set[int]:
        """Order needs of a task beyond its data; notes what it reads (memories ``read`` of ``sources``), writes and
        makes.
        """
        inputs, written = read, self._written(node)
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
        if self._has_effect(node):
            if self.effect >= 0:
                needs.add(self.effect)
            self.effect = i
        self.of[node] = self._results(i, node)
        if is_start(node):
            self.read_by[node] = sorted(inputs)
        return needs

    def _has_effect(self, node: fx.Node) -> bool:
        """Must stay in order with others of its kind: draws random numbers, checks, prints, or is opaque."""
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return isinstance(target, torch._ops.HigherOrderOperator) or node.op in ("call_module", "call_method")
        if id(target) not in self.effects:  # an operator's arguments do not matter
            random = torch.Tag.nondeterministic_seeded in target.tags
            self.effects[id(target)] = not (is_start(node) or is_wait(node)) and (
                random or (node.is_impure() and not target._schema.is_mutable)
            )
        return self.effects[id(target)]

    def inputs(self, sources: list[fx.Node]) -> set[int]:
        """Memories of these nodes."""
        return {m for a in sources for m in self.of.get(a, ())}

    def _written(self, node: fx.Node) -> set[int]:
        if node.op != "call_function" or not _writes(node.target):
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
            if (
                isinstance(whole, (list, tuple))
                and all(isinstance(v, torch.Tensor) or v is None for v in whole)
                and isinstance(node.args[1], int)
            ):
                at = sum(isinstance(v, torch.Tensor) for v in whole[: node.args[1] % len(whole)])
                return source[at : at + 1]
            return list(source)
        tensors = (
            [value]
            if isinstance(value, torch.Tensor)
            else [v for v in tree_leaves(value) if isinstance(v, torch.Tensor)]
        )
        if node.op == "call_function" and _aliases(node.target):
            aliased = [m for a in self._arguments(node, write=False) for m in self.of.get(a, ())]
            if aliased:
                return (aliased * len(tensors))[: len(tensors)]
        return [self._new(i, v, False) for v in tensors]

    def _new(self, i: int, value: torch.Tensor, kept: bool) -> int:
        size = value.element_size()
        for s in value.shape:
            size *= fake.hint(s)
        self.memories.append(_Memory(i, size, kept))
        return len(self.memories) - 1


@memoize.by_target
def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


@memoize.by_target
def _aliases(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and any(r.alias_info is not None for r in target._schema.returns)
