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
from mindspeed_fx.graph.op_sets import (
    REORDERINGS,
    RESHAPES,
    UNIT_DIMENSIONS,
    functional_form,
    is_random,
    may_alias,
    order_of,
)
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.storage import aliased_input

aten = torch.ops.aten
SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
"""View of a part -> its value written into the whole."""


def make_writes_functional(gm: fx.GraphModule) -> None:
    """Whatever is written into parts of a value that the graph makes, or into views of it, becomes a new value for the
    readers after it.

    Writes into inputs and through other views stay.
    """
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        parts = _parts(node) if len(written_nodes(node)) == 1 else None
        if parts is None or not _only_parts(node, parts, order):
            continue
        with gm.graph.inserting_before(node):
            value = _as_written(gm, node)
            if value is None:
                continue
            node.replace_all_uses_with(value)
            written = [(parts[0], value)]
            for part in parts:
                value = _put_back(gm, node, part, value)
                written.append((part.args[0], value))
        for old, new in written:
            order[new] = order[node]
            for user in [u for u in old.users if order.get(u, -1) > order[node]]:
                user.replace_input_with(old, new)
        gm.graph.erase_node(node)
    recompile(gm)


def _parts(node: fx.Node) -> list[fx.Node] | None:
    """The chain of parts and views from what ``node`` writes to the value that the graph made; None where it is no such
    chain."""
    chain, n = [], node.args[0]
    while isinstance(n, fx.Node) and (n.target in SCATTERS or _is_same_elements(n)):
        chain.append(n)
        n = n.args[0]
    is_made = isinstance(n, fx.Node) and n.op == "call_function" and aliased_input(n) is None
    return chain if chain and is_made else None


def _is_same_elements(n: fx.Node) -> bool:
    """Whether ``n`` is a view of all elements of its argument."""
    return n.target in (*RESHAPES, *UNIT_DIMENSIONS, *REORDERINGS) and aliased_input(n) is n.args[0]


def _put_back(gm: fx.GraphModule, node: fx.Node, part: fx.Node, value: fx.Node) -> fx.Node:
    """What ``part`` is a part or a view of, with ``value`` in the part's place."""
    whole = part.args[0]
    val = whole.meta["val"]
    if part.target in SCATTERS:
        return _call(gm, node, val, SCATTERS[part.target], (whole, value, *part.args[1:]), dict(part.kwargs))
    if (dims := order_of(part)) is not None:
        return _call(gm, node, val, aten.permute.default, (value, [dims.index(d) for d in range(len(dims))]))
    return _call(gm, node, val, aten.reshape.default, (value, list(val.shape)))


def _only_parts(node: fx.Node, parts: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether nobody reads the memory that ``node`` writes after it but through what the chain of ``parts`` names: a
    part taken before it would have to be taken anew."""
    base = parts[-1].args[0]
    views, todo = set(), [base]
    while todo:
        taken = [u for u in todo.pop().users if order.get(u, -1) < order[node] and may_alias(u.target)]
        todo += [u for u in taken if u not in views]
        views.update(taken)
    return all(order.get(user, -1) <= order[node] for view in views - set(parts) for user in view.users)


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
