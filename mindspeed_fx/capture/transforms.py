"""Calls of ``torch.func.vmap``, and of functions that Dynamo leaves whole, in a Dynamo graph: each becomes one call of
a graph of its own.

Dynamo inlines a function transform as calls that enter and leave its level, with wrapped tensors between them
(``associative_scan`` is spelled with vmap, so that a state space model has dozens). Tracing those again would record
the wrappers. From the entry to the exit the nodes are therefore moved, as they are, into the body of a ``wrap``, which
capture records as one node and passes do not read; what stands around it is captured like any graph. Values and
gradients are those of the graph as it was: AOTAutograd runs the body where the nodes stood. Other transforms (grad,
jvp) stay where they are, and so does the graph around them.

The same is done to a function that Dynamo does not look into (``torch.compiler.allow_in_graph``) and that applies an
``autograd.Function``: the operators of its forward say nothing of the gradient that it defines.
"""

from __future__ import annotations

import operator
from typing import Iterable

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import autocast, fake, fx_graph, higher_order, tracing, whole_calls
from mindspeed_fx.graph.annotate import WHOLE_CALL, is_transform
from mindspeed_fx.graph.writes import written_by

NAME = "transform_"


def isolate(gm: fx.GraphModule) -> str | None:
    """Move every vmap and every whole call of a Dynamo graph, and of the bodies of its higher-order operators, into a
    body of its own, in place; the reason where one cannot be moved (the graph then stays as Dynamo made it)."""
    for node in gm.graph.nodes:
        if (
            node.op == "get_attr"
            and not node.target.startswith(NAME)
            and isinstance(body := getattr(gm, node.target, None), fx.GraphModule)
            and (reason := isolate(body))
        ):
            return reason
    _move_whole_calls(gm)
    regions = _regions(gm)
    reason = next((r for r in regions if isinstance(r, str)), None) or next(
        (why for r in regions if (why := _stays(r))), None
    )
    if reason is None:
        for region in regions:
            _move(gm, region)
        if regions:
            gm.recompile()
    return reason


def _move_whole_calls(gm: fx.GraphModule) -> None:
    """Move what applies an ``autograd.Function`` or puts hooks on tensors unseen, with the reads of its results, unless
    a transform holds it."""
    if any(is_transform(n) for n in gm.graph.nodes):
        return
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and _has_own_gradient(n)]
    for call in calls:
        call.meta[WHOLE_CALL] = True
        _move(gm, [call, *(n for n in gm.graph.nodes if n.target is operator.getitem and n.args[0] is call)])
    if calls:
        gm.recompile()


def _has_own_gradient(n: fx.Node) -> bool:
    if not whole_calls.is_left_whole(n.target):  # values are looked up for the few calls that may be
        return False
    args, kwargs = fx.map_arg((n.args, n.kwargs), fx_graph.example_value_of)
    return whole_calls.has_own_gradient(n.target, args, kwargs)


def _regions(gm: fx.GraphModule) -> list[list[fx.Node] | str]:
    """The nodes from the entry of each outermost transform to its exit; a reason in place of one that is not left."""
    regions, region, depth = [], [], 0
    for n in gm.graph.nodes:
        if n.op != "output" and (region or is_transform(n)):
            region.append(n)
        change = tracing.transform_nesting(n.target) if is_transform(n) else 0
        depth += change
        if region and change < 0 and depth == 0:
            regions, region = [*regions, region], []
    used = [n for n in region if is_transform(n) and n.users]
    if depth or used:
        return [
            f"the graph applies a function transform of torch.func ({region[0].name}) that is not left again, and is "
            "not captured"
        ]
    return regions  # what is left over neither enters a transform nor gives a value: preparations of vmap


def _stays(region: list[fx.Node]) -> str | None:
    members = set(region)
    what = f"the graph applies a function transform of torch.func ({region[0].name})"
    if any(n.op == "placeholder" for n in region):
        return f"{what} before its last input, and is not captured"
    entered = next(n.target.__name__ for n in region if is_transform(n) and tracing.transform_nesting(n.target) > 0)
    if not entered.startswith("_vmap"):
        return f"{what}, which is no vmap, and is not captured"
    for n in region:
        if n.op == "call_function" and (tracing.is_grad_mode_switch(n.target) or autocast.is_autocast_switch(n.target)):
            return f"{what} and switches gradients or autocast inside, and is not captured"
        if written_by(n):
            return f"{what} and changes values in place inside ({n.name}), and is not captured"
        if any(u not in members for u in n.users) and tracing.is_function_wrapper(fx_graph.example_value_of(n)):
            return f"{what}, whose wrapped value {n.name} is used after it, and is not captured"
    return None


def keeps_writes(gm: fx.GraphModule) -> bool:
    """Whether writes must stay in the graphs that AOTAutograd makes: of tensors that are changed in place in the
    backward of an ``autograd.Function`` and also in the forward, that get other memory (``tensor.data = other``), or
    that take gradients. What is written after the graphs is a result of theirs, and gets a gradient of zeros.
    """
    graphs = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    if any(tracing.is_data_assignment(n.target) for m in graphs for n in m.graph.nodes) or _writes_parameters(gm):
        return True
    backward = [getattr(m, str(n.args[1].target)) for m in graphs for n in m.graph.nodes if _is_autograd_function(n)]
    if not any(_changes_values(b) for b in backward):
        return False
    return any(_changes_values(m) for m in graphs if all(m is not b for b in backward))


def _writes_parameters(gm: fx.GraphModule) -> bool:
    """Whether a graph that takes gradients writes an input that does."""
    results = gm.graph.output_node().all_input_nodes
    takes_gradients = any(n.meta.get("needs_grad", False) for n in results)
    if not takes_gradients and not any(v.requires_grad for v in _tensors(results)):
        return False
    parameters = {fake.storage_of(v) for v in _tensors(gm.graph.find_nodes(op="placeholder")) if v.requires_grad}
    written = _tensors([a for n in gm.graph.nodes for a in written_by(n)])
    # What a transform wraps is a value of its own, and has no memory to ask for.
    return any(fake.storage_of(v) in parameters for v in written if not tracing.is_function_wrapper(v))


def _tensors(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    values = pytree.tree_leaves([fx_graph.example_value_of(n) for n in nodes])
    return [v for v in values if isinstance(v, torch.Tensor)]


def _is_autograd_function(n: fx.Node) -> bool:
    return n.op == "call_function" and tracing.is_autograd_function(n.target)


def _changes_values(gm: fx.GraphModule) -> bool:
    return any(written_by(n) or tracing.is_mutable(n.target) for n in gm.graph.nodes)


def _move(gm: fx.GraphModule, region: list[fx.Node]) -> None:
    members = set(region)
    inputs = list(dict.fromkeys(a for n in region for a in n.all_input_nodes if a not in members))
    outputs = [n for n in region if any(u not in members for u in n.users)]
    body, inside = fx.Graph(), {}
    for a in inputs:
        inside[a] = body.placeholder(a.name)
        inside[a].meta = dict(a.meta)
    for n in region:
        inside[n] = body.node_copy(n, inside.__getitem__)
    body.output(tuple(inside[n] for n in outputs))
    name = next(name for i in range(len(gm.graph.nodes) + 1) if not hasattr(gm, name := f"{NAME}{i}"))
    gm.add_module(name, fx.GraphModule(gm, body))
    with gm.graph.inserting_before(region[0]):
        call = gm.graph.call_function(higher_order.wrap_operator(), (gm.graph.get_attr(name), *inputs))
        call.meta = {k: v for k, v in region[-1].meta.items() if k != "example_value"}
        call.meta["example_value"] = tuple(fx_graph.example_value_of(n) for n in outputs)
        for i, n in enumerate(outputs):
            item = gm.graph.call_function(operator.getitem, (call, i))
            item.meta = dict(n.meta)
            n.replace_all_uses_with(item, delete_user_cb=lambda u: u not in members)
    for n in reversed(region):
        gm.graph.erase_node(n)
