"""Nodes leave a graph, and the values they hold with them: those that nobody reads, and calls that others stand for. A
graph moves to another device."""

from __future__ import annotations

import operator
from typing import Sequence

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from mindspeed_fx.compat import tracing
from mindspeed_fx.graph.recompile import recompile

aten = torch.ops.aten


def drop_dead(gm: fx.GraphModule) -> None:
    """Remove nodes without users; switches, mutations, random numbers and higher-order operators stay."""
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and is_pure(node):
            gm.graph.erase_node(node)


def release(node: fx.Node) -> None:
    """As :func:`drop_dead` for ``node`` and what only it read."""
    if not node.users and not node._erased and is_pure(node):
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        for n in inputs:
            release(n)


def stand_in(call: fx.Node, results: Sequence[fx.Node]) -> None:
    """``results`` in place of what ``call`` returns, which is read by ``operator.getitem`` alone; the call leaves."""
    for item in list(call.users):
        item.replace_all_uses_with(results[item.args[1]])
        call.graph.erase_node(item)
    call.graph.erase_node(call)


def move_to(gm: fx.GraphModule, device: str) -> None:
    """Have what a graph, and those in it, make themselves (positions, masks), and their constants, on ``device``."""
    target = torch.device(device)
    for graph in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        changed = False
        for node in graph.graph.nodes:
            moved = map_aggregate((node.args, node.kwargs), lambda a: target if isinstance(a, torch.device) else a)
            if moved != (node.args, node.kwargs):
                node.args, node.kwargs = moved
                changed = True
            constant = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
            if isinstance(constant, torch.Tensor) and constant.device != target:
                setattr(graph, node.target, constant.to(target))
        if changed:
            recompile(graph)


def is_pure(node: fx.Node) -> bool:
    """Whether a call neither writes, nor draws random numbers, nor switches anything."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not (
            node.target._schema.is_mutable
            or torch.Tag.nondeterministic_seeded in node.target.tags
            or tracing.has_side_effect(node.target)
        )
    return node.op == "get_attr" or (node.op == "call_function" and node.target is operator.getitem)
