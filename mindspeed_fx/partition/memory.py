"""Bytes that a graph keeps alive, from its fake values: allocations alone, in the order of the graph, views shared."""

from __future__ import annotations

from typing import Any, Iterator

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx import compat
from mindspeed_fx.partition.liveness import curve


def peak(gm: fx.GraphModule) -> dict[str, Any]:
    """``inputs``, ``outputs`` and the ``peak`` of bytes alive while the graph runs, with the ``node`` where it is reached.

    Inputs live throughout: parameters do, and what a backward is given is held by its caller. A value dies after its
    last use; workspaces within an operator and the allocator's rounding are not counted.
    """
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    bytes_: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for key, size in _storages(node):
            bytes_.setdefault(key, size)
            first.setdefault(key, position)
        for used in (node, *node.all_input_nodes):
            for key, _ in _storages(used):
                last[key] = position
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    for n in (*output.all_input_nodes, *(n for n in nodes if n.op in ("placeholder", "get_attr"))):
        last.update((key, len(nodes) - 1) for key, _ in _storages(n))
    alive = curve(len(nodes), ((size, first[key], last[key]) for key, size in bytes_.items()))
    best = max(alive, default=0)
    where = nodes[alive.index(best)].name if best else ""
    return {"inputs": _total(n for n in nodes if n.op == "placeholder"), "outputs": _total(output.all_input_nodes), "peak": best, "node": where}


def made(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Bytes that each call allocates for its results: views and results written to inputs take none."""
    known = {key for n in gm.graph.nodes if n.op in ("placeholder", "get_attr") for key, _ in _storages(n)}
    found: dict[fx.Node, int] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            new = {key: size for key, size in _storages(node) if key not in known}
            known.update(new)
            found[node] = sum(new.values())
    return found


def saved(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Bytes that ``backward`` is given of what ``forward`` made: the activations kept between the two."""
    given = {key for n in forward.graph.nodes if n.op == "placeholder" for key, _ in _storages(n)}
    made = dict(item for n in next(n for n in forward.graph.nodes if n.op == "output").all_input_nodes for item in _storages(n) if item[0] not in given)
    names = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
    output = next(n for n in forward.graph.nodes if n.op == "output")
    return sum({key: size for n in output.all_input_nodes if n.name in names for key, size in _storages(n) if key in made}.values())


def _storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of the memory behind the node's value."""
    if node.op == "output":
        return
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield compat.storage_of(value), compat.hint(value.untyped_storage().nbytes())


def _total(nodes: Any) -> int:
    return sum({key: size for n in nodes for key, size in _storages(n)}.values())
