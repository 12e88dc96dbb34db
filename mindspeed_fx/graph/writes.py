"""What a call changes in place, in a graph that Dynamo made, of functions and methods, or in a captured one."""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.graph.annotate import written_nodes

IN_PLACE = frozenset(
    f"i{name}" for name in "add and concat floordiv lshift matmul mod mul or pow rshift sub truediv xor".split()
) | {"setitem", "delitem"}
"""Functions of :mod:`operator` that write; ``and_``, ``or_``, ``not_`` and ``is_`` do not."""


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory ``node`` changes in place: by its operator's schema, by its name (``add_``, ``+=``,
    ``__setitem__``, ``_foreach_add_``), by ``out=``, or by ``inplace=True``, as of ``torch.nn.functional.relu``.
    """
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        return written_nodes(node)
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    places = [first] if _is_named_so(node.target) or _is_asked_to(node) else []
    return _nodes([*places, node.kwargs.get("out")])


def _is_named_so(target: str | Callable) -> bool:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if getattr(target, "__module__", "") == "_operator":
        return name in IN_PLACE
    if name.startswith("__"):
        return name.strip("_") in IN_PLACE
    return name.endswith("_") and name != "requires_grad_"


def _is_asked_to(node: fx.Node) -> bool:
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is True
    place = None if isinstance(node.target, str) else _place_of_inplace(node.target)
    return place is not None and place < len(node.args) and node.args[place] is True


@functools.lru_cache(4096)
def _place_of_inplace(function: Callable) -> int | None:
    """The position of the argument ``inplace``."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin function, which has no such argument
        return None
    return names.index("inplace") if "inplace" in names else None


def _nodes(value: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes
