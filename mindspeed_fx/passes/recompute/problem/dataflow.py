"""The forward part of a joint graph as the planner sees it: operations, the memory they fill, and what the backward
needs.

Views have no memory of their own: they belong to the value they are views of and cost nothing to make again. So a
*value* is one block of memory, an *operation* is a call that fills one or several, and saving any view of a value saves
all of it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.storage import aliased_input, is_view, storage_bytes


@dataclass(eq=False)
class Operation:
    """One call of the forward that is no view."""

    node: fx.Node
    inputs: list["Value"] = field(default_factory=list)
    outputs: list["Value"] = field(default_factory=list)

    @property
    def fusible(self) -> bool:
        """Generated code fuses it with its neighbours."""
        return partitioner.is_fusible(self.node)


@dataclass(eq=False)
class Value:
    """One block of memory that the forward fills."""

    node: fx.Node
    """Saving this node saves the value."""
    made_by: Operation
    bytes: int
    returned: bool = False
    """The caller gets it, so that it stays alive anyhow."""
    needed: bool = False
    """The backward reads it."""
    views: list[fx.Node] = field(default_factory=list)
    """Every node that shares its memory, itself first."""

    @property
    def savable(self) -> bool:
        """False for what AOTAutograd cannot hand to a backward: numbers with a fraction, and the nothing that a check
        returns.
        """
        value = self.node.meta.get("val")
        return value is not None and not isinstance(value, (torch.SymFloat, float)) and self.node.op != "get_attr"


@dataclass
class Dataflow:
    operations: list[Operation]
    values: list[Value]
    of: dict[fx.Node, Value]
    """Node -> the value whose memory it is; inputs and their views have none."""
    readers: dict[fx.Node, list[Operation]] = field(default_factory=dict)
    """Node -> the operations that read it as it is."""


def record(graph: fx.Graph, info: Any) -> Dataflow | str:
    """The tape of a joint graph; a reason when it holds something that this planner does not understand.

    Args:
        info: torch's classification of the nodes, as :func:`compat_partition.partition` hands it on.
    """
    backward = partitioner.backward_nodes(info)
    tape = Dataflow([], [], {})
    results: dict[fx.Node, Operation] = {}
    for node in graph.nodes:
        if node in backward or node.op in ("placeholder", "output"):
            continue
        if node.op not in ("call_function", "get_attr"):
            return f"{node.name} is a {node.op}"
        value = node.meta.get("val")
        if not _understood(value):
            return f"{node.name} ({node.target}) returns {type(value).__name__}"
        source = aliased_input(node)
        if source is not None:
            if source in tape.of:
                tape.of[node] = tape.of[source]
                tape.of[node].views.append(node)
            continue
        if isinstance(value, (tuple, list)):
            if is_view(node):
                continue  # the pieces are views of its input
            results[node] = _operation(tape, node)
            continue
        maker = (
            results[node.args[0]]
            if node.target is operator.getitem and node.args[0] in results
            else _operation(tape, node)
        )
        tape.of[node] = Value(node, maker, storage_bytes(value), views=[node])
        maker.outputs.append(tape.of[node])
        tape.values.append(tape.of[node])
    for node in _returned_values(graph, info):
        if node in tape.of:
            tape.of[node].returned = True
    for node in partitioner.needed_by_backward(info):
        if node in tape.of:
            tape.of[node].needed = True
    return tape


def saved_names(graph: fx.Graph, info: Any, saved: set[fx.Node]) -> list[str]:
    """Names of ``saved`` and of the inputs that the backward needs beside, in graph order: what torch's partitioner
    expects.
    """
    results, seen, todo = set(), set(), list(partitioner.needed_by_backward(info))
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in saved or partitioner.is_input(node):
            results.add(node)
        else:
            todo.extend(node.all_input_nodes)
    return [n.name for n in graph.nodes if n in results]


def _operation(tape: Dataflow, node: fx.Node) -> Operation:
    result = Operation(node)
    for source in node.all_input_nodes:
        if source in tape.of:
            tape.readers.setdefault(source, []).append(result)
            if tape.of[source] not in result.inputs:
                result.inputs.append(tape.of[source])
    tape.operations.append(result)
    return result


def _understood(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(v is None or _understood(v) for v in value)
    return value is None or isinstance(
        value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    )


def _returned_values(graph: fx.Graph, info: Any) -> list[fx.Node]:
    backward = partitioner.backward_nodes(info)
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    return [n for n in output.all_input_nodes if n not in backward]
