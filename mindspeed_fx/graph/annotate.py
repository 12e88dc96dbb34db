"""What every node of a captured graph is told: whether autograd records it, whether a gradient flows into it, whether
its memory is written.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, tracing
from mindspeed_fx.graph.schema import argument

aten = torch.ops.aten


def bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """Graphs that higher-order operators of ``gm`` run as part of the forward, in captured form (an autograd.Function's
    own backward is not one, nor is a function transform or a whole call)."""
    results: list[fx.GraphModule] = []
    if not holds_graphs(gm):
        return results
    for node in gm.graph.nodes:
        if node.op == "call_function" and tracing.is_higher_order(node.target):
            graphs = [getattr(gm, str(a.target)) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
            graphs = [g for g in graphs if isinstance(g, fx.GraphModule)]
            graphs = graphs[:1] if tracing.is_autograd_function(node.target) else graphs
            results += [g for g in graphs if _is_captured(g) and not is_isolated_body(g)]
    return results


def holds_graphs(gm: fx.GraphModule) -> bool:
    """Whether an operator of ``gm`` can run a graph: most graphs hold none, which is known without reading them."""
    return any(isinstance(module, fx.GraphModule) for module in gm.children())


def _is_captured(gm: fx.GraphModule) -> bool:
    """False for a body that was left as Dynamo made it, which has no fake values under "val"."""
    return any("val" in n.meta for n in gm.graph.nodes)


def annotate(gm: fx.GraphModule, needs_grad: dict[str, bool] | None = None) -> None:
    """Write what a matcher must know into ``node.meta``.

    ``grad_enabled``: autograd records this node. ``needs_grad``: a gradient flows into this value. ``mutated``: the
    value's memory is changed in place by some node of the graph.
    """
    grad_enabled = True
    owners: dict[int, list[fx.Node]] = {}
    mutated = {
        fake.storage_of(w.meta["val"])
        for n in gm.graph.nodes
        for w in written_nodes(n)
        if isinstance(w.meta.get("val"), torch.Tensor)
    }
    for node in gm.graph.nodes:
        if node.op == "call_function" and tracing.is_grad_mode_switch(node.target):
            grad_enabled = bool(node.args[0])
        node.meta["grad_enabled"] = grad_enabled
        node.meta["mutated"] = False
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            owners.setdefault(fake.storage_of(value), []).append(node)
        if node.op == "placeholder":
            flows = node.meta.get("requires_grad", True) and _differentiable(value)
        else:
            cut = node.target is aten.detach.default or (
                node.target in _FACTORIES and fake.storage_of(value) not in mutated
            )
            flows = grad_enabled and not cut and _differentiable(value)
            flows = flows and any(a.meta.get("needs_grad") for a in node.all_input_nodes)
        node.meta["needs_grad"] = bool(flows)
    for storage in mutated:
        for node in owners.get(storage, ()):
            node.meta["mutated"] = True


_FACTORIES = (
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
"""What reads the type of a value alone, and takes no gradient."""


def written_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory ``node`` changes in place."""
    if (
        node.op != "call_function"
        or not isinstance(node.target, torch._ops.OpOverload)
        or not node.target._schema.is_mutable
    ):
        return []
    results = []
    for a in node.target._schema.arguments:
        if a.alias_info is not None and a.alias_info.is_write:
            value = argument(node, a.name)
            results += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)]
    return results


def _differentiable(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_differentiable(v) for v in value)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def is_transform(n: fx.Node) -> bool:
    return n.op == "call_function" and tracing.is_function_transform(n.target)


WHOLE_CALL = "whole_call"
"""Mark of a node that calls a function with a gradient of its own."""


def is_isolated_body(gm: fx.GraphModule) -> bool:
    """True for a body that :func:`isolate` made: it is not read."""
    return any(is_transform(n) or WHOLE_CALL in n.meta for n in gm.graph.nodes)
