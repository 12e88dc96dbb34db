"""Attention masks whose values are known while compiling: those that are made of positions and constants alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.sharding.constraint import operands

MOST = 2**28
"""Elements of the largest value that is computed here."""

aten = torch.ops.aten
VARLEN = torch.ops.mindspeed.varlen_attention.default
ATTENTION = {
    torch.ops.mindspeed.attention.default: "mask",
    VARLEN: "documents",
    aten.scaled_dot_product_attention.default: "attn_mask",
}
"""Operator -> its argument that is the mask, or numbers the documents [batch or 1, sequence]."""


def known_masks(gm: fx.GraphModule, arguments: dict[fx.Node, Any] | None = None) -> dict[fx.Node, torch.Tensor]:
    """Attention node -> bool [queries, keys], each 1 where the mask is broadcast: where any batch and head attends.
    Nodes of checkpointed regions are among them; masks that depend on an input, are drawn, or are larger than
    :data:`MOST` are not.

    Args:
        arguments: values of placeholders that are known.
    """
    values: dict[fx.Node, Any] = dict(arguments or {})
    results: dict[fx.Node, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in ATTENTION:
            mask = argument(node, ATTENTION[node.target])
            if (
                isinstance(mask, fx.Node)
                and isinstance(value := _value(mask, values), torch.Tensor)
                and value.ndim >= 2
            ):
                value = value.unsqueeze(2) == value.unsqueeze(1) if node.target is VARLEN else value
                allowed = value if value.dtype == torch.bool else value != -math.inf
                results[node] = allowed.flatten(0, -3).any(0) if value.ndim > 2 else allowed
        elif tracing.is_higher_order(node.target):
            for body, inner in operands(gm, node):
                known = {
                    p: v
                    for p, a in inner.items()
                    if isinstance(a, fx.Node) and isinstance(v := _value(a, values), torch.Tensor)
                }
                results |= known_masks(body, known)
    return results


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What ``node`` computes, on cpu; None where that is not known. ``values`` remembers."""
    pending = [node]
    while pending:
        n = pending[-1]
        if n in values:
            pending.pop()
        elif not _computable(n):
            values[n] = None
        elif missing := [a for a in n.all_input_nodes if a not in values]:
            pending += missing
        else:
            values[n] = None if any(values[a] is None for a in n.all_input_nodes) else _compute(n, values)
    return values[node]


def _computable(n: fx.Node) -> bool:
    if n.op != "call_function" or n.meta.get("mutated"):
        return False
    if n.target.__class__ is torch._ops.OpOverload:
        schema = n.target._schema
        if torch.Tag.nondeterministic_seeded in n.target.tags or schema.is_mutable:
            return False
    elif n.target.__module__ not in ("_operator", f"{__package__}.place"):
        return False
    value = n.meta.get("val")
    return not isinstance(value, torch.Tensor) or (
        all(isinstance(s, int) for s in value.shape) and value.numel() <= MOST
    )


def _compute(n: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((n.args, dict(n.kwargs)), values.__getitem__)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    with tracing.outside_tracing():
        return n.target(*args, **kwargs)
