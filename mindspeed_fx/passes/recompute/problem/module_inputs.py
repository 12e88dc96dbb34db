"""Which values enter a module: hidden states, as a layer gets them from the one before it.

A value enters where an operation within the module reads it, nothing within the module made it, and it carries a
gradient: it depends on an input of the graph that has one. Masks and rotary tables, which all layers share, do not. A
fused sum and norm at a border belongs to the module of its norm; its sum enters that module where all that is summed
comes from outside.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import torch
import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.op_sets import is_residual_sum
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow, Operation, Value


@dataclass
class Entered:
    """What enters some modules."""

    values: list[Value] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    """Paths of the modules that nothing made in this graph enters."""


def entering(tape: Dataflow, module_of: Callable[[str], str | None]) -> Entered:
    """What enters the modules that ``module_of`` finds.

    Args:
        module_of: path of a module -> the path of the one asked for that it is, or lies in; None: it is in none.
    """
    home = {o: module_of(module_path(o.node)) for o in tape.operations}
    modules = dict.fromkeys(m for m in home.values() if m is not None)
    borders = {o for o in tape.operations if home[o] is not None and _is_border(o, home)}
    carriers = _carriers(tape)
    result, reached = Entered(), set()
    for v in tape.values:
        if v.node not in carriers or not _is_floating(v.node):
            continue
        readers = {o for view in v.views for o in tape.readers.get(view, ())} - borders
        if v.made_by in borders and is_residual_sum(v.node):
            entered = {home[v.made_by]}
        else:
            entered = {home[o] for o in readers} - {None, home[v.made_by]}
        if entered:
            result.values.append(v)
            reached |= entered
    result.without = [m for m in modules if m not in reached]
    return result


def _is_border(o: Operation, home: dict[Operation, str | None]) -> bool:
    """Whether it sums, for the norm that it is fused with, what comes from outside its module alone."""
    sums = any(is_residual_sum(v.node) for v in o.outputs)
    return sums and all(home[x.made_by] != home[o] for x in o.inputs)


def _carriers(tape: Dataflow) -> set[fx.Node]:
    """Nodes that depend on an input with a gradient."""
    if not tape.operations:
        return set()
    graph = tape.operations[0].node.graph
    results = partitioner.inputs_with_gradient(graph)
    for node in graph.nodes:
        if any(a in results for a in node.all_input_nodes):
            results.add(node)
    return results


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
