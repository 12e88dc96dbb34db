"""Bytes that a graph keeps alive, from its fake values: allocations alone, in the order of the graph, views shared."""

from __future__ import annotations

from typing import Any, Iterator

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import fake
from mindspeed_fx.graph.liveness import curve


def peak(gm: fx.GraphModule) -> dict[str, Any]:
    """``inputs``, ``outputs`` and the ``peak`` of bytes alive while the graph runs, with the ``node`` where it is
    reached.

    Inputs live throughout: parameters do, and what a backward is given is held by its caller. A value dies after its
    last use; workspaces within an operator and the allocator's rounding are not counted.
    """
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    bytes_: dict[Any, int] = {}
    keys = _keys(gm)
    for position, node in enumerate(nodes):
        for key, size in keys[node]:
            bytes_.setdefault(key, size)
            first.setdefault(key, position)
        for used in (node, *node.all_input_nodes):
            for key, _ in keys[used]:
                last[key] = position
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    for n in (*output.all_input_nodes, *(n for n in nodes if n.op in ("placeholder", "get_attr"))):
        last.update((key, len(nodes) - 1) for key, _ in keys[n])
    alive = curve(len(nodes), ((size, first[key], last[key]) for key, size in bytes_.items()))
    best = max(alive, default=0)
    where = nodes[alive.index(best)].name if best else ""
    return {
        "inputs": _total(keys, (n for n in nodes if n.op == "placeholder")),
        "outputs": _total(keys, output.all_input_nodes),
        "peak": best,
        "node": where,
    }


def made(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Bytes that each call allocates for its results: views and results written to inputs take none."""
    keys = _keys(gm)
    known = {key for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") for key, _ in keys[n]}
    found: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            new = {key: size for key, size in keys[node] if key not in known}
            known.update(new)
            found[node] = sum(new.values())
    return found


def saved(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Bytes that ``backward`` is given of what ``forward`` made: the activations kept between the two."""
    keys = _keys(forward)
    given = {key for n in forward.graph.nodes if n.op == "placeholder" for key, _ in keys[n]}
    names = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
    output = next(n for n in forward.graph.nodes if n.op == "output")
    return sum(
        {
            key: size for n in output.all_input_nodes if n.name in names for key, size in keys[n] if key not in given
        }.values()
    )


def _keys(gm: fx.GraphModule) -> dict[fx.Node, list[tuple[Any, int]]]:
    """(identity, bytes) of the memory behind every node's value.

    What is lowered is traced once for all layers, whose values then share their fake memory; so a call's result is
    memory of its own unless its schema says that it is its argument's, or an argument has that memory.
    """
    keys: dict[fx.Node, list[tuple[Any, int]]] = {}
    behind: dict[fx.Node, dict[int, Any]] = {}
    for node in gm.graph.nodes:
        inputs = {s: key for n in node.all_input_nodes for s, key in behind[n].items()}
        base = node.args[0] if _aliases_first(node) else None
        first = keys[base][0][0] if isinstance(base, fx.Node) and len(keys[base]) == 1 else None
        behind[node] = {}
        keys[node] = []
        for storage, size in _storages(node):
            key = inputs.get(storage, (node.name, storage) if first is None else first)
            behind[node][storage] = key
            keys[node].append((key, size))
    return keys


def _aliases_first(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return bool(schema is not None and node.args and schema.returns and schema.returns[0].alias_info is not None)


def _storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of the memory behind the node's value."""
    if node.op == "output":
        return
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield fake.storage_of(value), fake.hint(value.untyped_storage().nbytes())


def _total(keys: dict, nodes: Any) -> int:
    return sum({key: size for n in nodes for key, size in keys[n]}.values())
