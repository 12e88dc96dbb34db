"""The part of :mod:`mindspeed_fx.compat` about ``auto_functionalized``: calls that write their arguments, in functional
graphs.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch.fx as fx


def mutable_operator(node: fx.Node) -> Any:
    """The operator that an ``auto_functionalized_v2`` node calls; None for other nodes, and where torch has no such."""
    try:
        from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
    except ImportError:
        return None
    return node.args[0] if node.op == "call_function" and node.target is auto_functionalized_v2 else None


def bases_of(node: fx.Node) -> list[fx.Node] | None:
    """The tensors that an ``auto_functionalized_v2`` node writes, whole; its results 1, 2 ... are what they become.
    None when it writes to views of them.
    """
    bases = node.kwargs.get("_all_bases")
    views = [
        k
        for k in node.kwargs
        if k.startswith("_")
        and k.endswith(("_size", "_stride", "_storage_offset", "_slice_dim", "_slice_start", "_slice_end"))
    ]
    return None if bases is None or views else list(bases)


def argument_nodes(node: fx.Node) -> dict[str, Any] | None:
    """What the operator of an ``auto_functionalized_v2`` node is called with, by name; None when it writes to views, or
    to lists of tensors.
    """
    bases = bases_of(node)
    if bases is None:
        return None
    values = {k: v for k, v in node.kwargs.items() if not k.startswith("_")}
    for argument in node.args[0]._schema.arguments:
        if argument.name not in values:
            position = node.kwargs.get(f"_{argument.name}_base_index")
            if position is None:
                return None
            values[argument.name] = bases[position]
    return values


def written_positions(node: fx.Node, names: Sequence[str]) -> dict[str, list[int]]:
    """Positions among the bases, for every argument that is a list of tensors to write."""
    return {
        name: [node.kwargs[f"_{name}_{k}_base_index"] for k in range(node.kwargs[f"_{name}_length"])] for name in names
    }
