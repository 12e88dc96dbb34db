"""Writes into parts of a value become values of their own, before a graph runs on DTensors.

Latent attention fills its keys part by part: ``keys[..., :n].copy_(a)``. A part of a DTensor is a value of its own, so
that the write would not reach the whole, nor its gradient the part. Here ``keys`` becomes ``slice_scatter(keys, a,
...)`` for all who read it afterwards. AOTAutograd does the same to whole graphs, but only to the local program, after
the DTensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.op_sets import functional_form, is_random, may_alias

aten = torch.ops.aten
SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""View of a part -> its value written into the whole."""


def make_writes_functional(gm: fx.GraphModule) -> None:
    """Whatever is written into parts of a value that the graph makes becomes a new value for the readers after it.

    Writes into inputs and through other views stay.
    """
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        parts = _parts(node) if len(written_nodes(node)) == 1 else None
        if parts is None or not _only_parts(node, parts[-1].args[0], order):
            continue
        base = parts[-1].args[0]
        with gm.graph.inserting_before(node):
            value = _as_written(gm, node)
            if value is None:
                continue
            node.replace_all_uses_with(value)
            for part in parts:
                whole = part.args[0]
                value = _call(
                    gm,
                    node,
                    whole.meta["val"],
                    SCATTERS[part.target],
                    (whole, value, *part.args[1:]),
                    dict(part.kwargs),
                )
        order[value] = order[node]
        later = [u for u in base.users if order.get(u, -1) > order[node]]
        for user in later:
            user.replace_input_with(base, value)
        gm.graph.erase_node(node)
    gm.recompile()


def _parts(node: fx.Node) -> list[fx.Node] | None:
    """The chain of parts from what ``node`` writes to the value that the graph made; None where it is no such chain."""
    chain, n = [], node.args[0]
    while isinstance(n, fx.Node) and n.target in SCATTERS:
        chain.append(n)
        n = n.args[0]
    return chain if chain and isinstance(n, fx.Node) and n.op == "call_function" else None


def _only_parts(node: fx.Node, base: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether nobody reads the memory of ``base`` after ``node`` but through ``base`` itself: a part taken before it
    would have to be taken anew."""
    views = [u for u in base.users if order.get(u, -1) < order[node] and may_alias(u.target)]
    return all(order[user] <= order[node] for view in views for user in view.users)


def _as_written(gm: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """The part as ``node`` leaves it; None where no functional operator computes it."""
    part = node.args[0].meta["val"]
    if node.target is not aten.copy_.default:
        functional = functional_form(node.target)
        return (
            None
            if functional is None or is_random(functional)
            else _call(gm, node, part, functional, node.args, dict(node.kwargs))
        )
    value = node.args[1]
    if value.meta["val"].dtype != part.dtype:
        value = _call(gm, node, value.meta["val"].to(part.dtype), aten.to.dtype, (value, part.dtype))
    if value.meta["val"].shape != part.shape:
        value = _call(gm, node, part, aten.expand.default, (value, list(part.shape)))
    return value


def _call(gm: fx.GraphModule, node: fx.Node, val: Any, target: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
    new = gm.graph.call_function(target, args, kwargs or {})
    new.meta = {**node.meta, "val": val, "mutated": False}
    return new
