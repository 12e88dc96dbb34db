"""Nodes that nobody reads leave a graph, and the values they hold with them."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing

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


def is_pure(node: fx.Node) -> bool:
    """Whether a call neither writes, nor draws random numbers, nor switches anything."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not (
            node.target._schema.is_mutable
            or torch.Tag.nondeterministic_seeded in node.target.tags
            or tracing.has_side_effect(node.target)
        )
    return node.op == "get_attr" or (node.op == "call_function" and node.target is operator.getitem)
