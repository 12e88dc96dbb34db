"""The order of collectives, kept through Inductor.

Inductor orders the kernels it generates by itself (fusion, peak memory). After its own graph passes, right before it
lowers, the order that the graph has then is made binding where it matters: what a transfer runs under comes after its
start and before its wait, and the starts of one group stay in order. Matrix products and other calls that Inductor does
not fuse carry these dependencies wherever there is one, so that they cost no fusion.
"""

from __future__ import annotations

from typing import Any, Iterable

import torch
import torch.fx as fx

from mindspeed_fx.compat import distributed, inductor
from mindspeed_fx.graph.collectives import group_of, is_start, is_wait, waits_of
from mindspeed_fx.graph.op_sets import may_alias
from mindspeed_fx.passes.base import Pass

_CALLS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_scaled_mm", "_grouped_mm")


class Pin(inductor.CustomPass):
    """Inductor's last graph hook: the user's pass of that hook, if any, then :func:`pin`."""

    def __init__(self, name: str, first: Any = None):
        self.name, self.first = name, first

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        pin(graph)

    def uuid(self) -> Any:
        if self.first is None:
            return self.name
        own = self.first.uuid() if hasattr(self.first, "uuid") else None
        return (self.name, own) if own else None


def inductor_settings(passes: Iterable[Pass], config: dict[str, Any], name: str) -> tuple[Pin | None, dict[str, Any]]:
    """The hook and the Inductor settings that keep the scheduler's order; nothing in a process of its own.

    Args:
        passes: those in force.
        config: the user's Inductor settings.
        name: what caches know the backend by.
    """
    if not distributed.world_is_parallel() or not any(p.name == "overlap.schedule" for p in passes):
        return None, config
    config = dict(config)
    first = config.pop("post_grad_custom_post_pass", None)
    return Pin(name, first), {"reorder_for_locality": False, **config}


def pin(graph: fx.Graph) -> bool:
    """Make the order of ``graph``'s collectives binding, in place; False where this torch cannot."""
    needs = dependencies(graph)
    return not needs or distributed.insert_order(graph, needs)


def dependencies(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> earlier nodes it must stay behind, in graph order."""
    nodes = list(graph.nodes)
    place = {n: k for k, n in enumerate(nodes)}
    calls = [k for k, n in enumerate(nodes) if _is_call(n)]
    results: dict[fx.Node, dict[fx.Node, None]] = {}
    last_of: dict[str, fx.Node] = {}
    before = -1  # last call so far
    at = 0
    for k, node in enumerate(nodes):
        while at < len(calls) and calls[at] < k:
            before, at = calls[at], at + 1
        if not is_start(node):
            continue
        previous = last_of.get(group_of(node))
        if previous is not None:
            results.setdefault(node, {})[previous] = None
        last_of[group_of(node)] = node
        if before >= 0:
            results.setdefault(node, {})[nodes[before]] = None
        for wait in waits_of(node):
            under = [j for j in calls if k < j < place[wait]] or [
                j for j in range(k + 1, place[wait]) if _is_work(nodes[j])
            ]
            if under:
                results.setdefault(nodes[under[0]], {})[node] = None
                results.setdefault(wait, {})[nodes[under[-1]]] = None
    return {
        n: [d for d in results[n] if d not in n.all_input_nodes]
        for n in nodes
        if n in results and any(d not in n.all_input_nodes for d in results[n])
    }


def _is_call(node: fx.Node) -> bool:
    """Runs as a call of its own, not fused with neighbours."""
    if node.target is torch.ops.higher_order.invoke_subgraph:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    name, space = node.target._schema.name.split("::")[1], node.target.namespace
    return (
        name in _CALLS
        or "attention" in name
        or space not in ("aten", "prims", "inductor_prims", "_c10d_functional", "prim")
    )


def _is_work(node: fx.Node) -> bool:
    if (
        node.op != "call_function"
        or not isinstance(node.target, torch._ops.OpOverload)
        or is_start(node)
        or is_wait(node)
    ):
        return False
    return isinstance(node.meta.get("val"), torch.Tensor) and not may_alias(node.target)
