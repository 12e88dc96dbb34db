"""What a walk asks of single nodes."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.sharding.audit.relations.numbers import LIKE
from mindspeed_fx.sharding.audit.relations.parts import Fill

FILLS = LIKE | {"scalar_tensor"}
SIZED = frozenset(["expand", "slice_backward"])
"""Operators that are told sizes, which are a rank's own."""


def filled(n: fx.Node, short: str, like: Fill | None = None) -> Fill:
    """A tensor of one number."""
    shape = tuple(n.meta["val"].shape)
    if like is not None:
        return Fill(like.value, shape)
    if short == "scalar_tensor":
        return Fill(float(n.args[0]), shape)  # type: ignore[arg-type]
    if "full" in short:
        return Fill(float(n.args[2 if short == "new_full" else 1]), shape)  # type: ignore[arg-type]
    return Fill(float("ones" in short), shape)


def is_integer(n: fx.Node) -> bool:
    """Whether its results are numbers, or counts of such."""
    values = [v for v in pytree.tree_leaves(n.meta.get("val")) if hasattr(v, "dtype")]
    counted = getattr(n.target, "_opname", "") in ("histc", "bincount")
    return n.op == "get_attr" or counted or bool(values) and not any(v.is_floating_point() for v in values)


def name_of(target: Any) -> str:
    return f"{target.namespace}.{target._opname}" if hasattr(target, "_opname") else str(target)


def key_of(n: fx.Node) -> tuple:
    """What decides the function beside its tensors; sizes do not, they are those of the tensors."""
    plain = pytree.tree_map(lambda a: "tensor" if isinstance(a, fx.Node) else a, list(n.args))
    named = {k: v for k, v in n.kwargs.items() if k not in ("device", "pin_memory", "layout", "memory_format")}
    return repr(plain), repr(sorted(named.items()))


def numbers_of(n: fx.Node) -> list:
    return [a for a in pytree.tree_leaves([n.args, n.kwargs]) if isinstance(a, (int, float))]


def live_nodes(graph: fx.Graph) -> list[fx.Node]:
    """Inputs, results and what they are computed from, in order. What else a trace holds depends on what was traced
    before it."""
    output = next(n for n in reversed(graph.nodes) if n.op == "output")
    live, stack = {output}, [output]
    while stack:
        for n in stack.pop().all_input_nodes:
            if n not in live:
                live.add(n)
                stack.append(n)
    return [n for n in graph.nodes if n.op == "placeholder" or n in live]
