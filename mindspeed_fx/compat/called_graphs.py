"""Graphs that a graph calls, of which Inductor makes code once: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
import operator
from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat.graph_inputs import copy_dynamo_graph


@functools.cache
def keep_inputs() -> None:
    """Inductor (2.11 to 2.14) takes the numbers of those inputs of a backward whose memory may be written anew for
    numbers of the inputs of each graph that it calls, too: a table that all layers read, or a gradient that the
    caller still holds, was overwritten by the first of them. A called graph leaves its inputs as they are.
    """
    from torch._inductor.graph import SubgraphLowering

    begin = SubgraphLowering.__init__

    @functools.wraps(begin)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.bw_donated_idxs = None

    SubgraphLowering.__init__ = __init__


@functools.cache
def allow_calls_that_wait() -> None:
    """Inductor of torch 2.14 takes all that a node is given that waits for another one (``control_deps``) for values
    to be realized, the graph that it calls, too, which has nothing to realize.
    """
    from torch._inductor.ir import IRNode, Subgraph

    if Subgraph.realize is IRNode.realize:
        Subgraph.realize = lambda self: None
        Subgraph.get_name = lambda self: self.name


@functools.cache
def keep_equal_values() -> None:
    """Inductor (2.13 and 2.14) asks behind its passes whether a called graph still returns what it did, and takes one
    and the same fake value for another: every call, and what reads it, was evaluated again, twice for each graph.
    """
    from torch._inductor import fx_utils

    compare = getattr(fx_utils, "_is_fake_tensor_same", None)
    if compare is None:
        return

    @functools.wraps(compare)
    def is_same(new: Any, old: Any, *args: Any, **kwargs: Any) -> bool:
        return new is old or compare(new, old, *args, **kwargs)

    fx_utils._is_fake_tensor_same = is_same


def inline_regions(gm: fx.GraphModule) -> None:
    """The calls of regions in a copy of Dynamo's graph -> what they call, in place, as Dynamo gives it of code without
    the mark (``torch.compiler.nested_compile_region``). The mark has done its work: Dynamo has read one region for all.
    From here on layers that are alike are shared where that costs nothing. Regions with options of their own stay.
    """
    for body in [m for m in gm.children() if isinstance(m, fx.GraphModule)]:
        inline_regions(body)  # of checkpoints and other regions
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        region = call.args[0]
        body = getattr(gm, region.target)
        if body.meta.get("nested_region_config") is None:
            _inline(gm, call, body)
            if not region.users:
                gm.graph.erase_node(region)
            if all(n.target != region.target for n in gm.graph.find_nodes(op="get_attr")):
                delattr(gm, region.target)


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    _, _, *inputs = call.args
    made: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with gm.graph.inserting_before(call):
        results = gm.graph.graph_copy(body.graph, made)
    for old, new in made.items():
        if old.op == "get_attr":  # a graph that the region calls: passes change it in place, for one caller
            new.target = f"{call.name}_{old.target}"
            own = getattr(body, old.target)
            setattr(gm, new.target, copy_dynamo_graph(own) if isinstance(own, fx.GraphModule) else own)
        if old.op != "placeholder":
            new.meta = dict(new.meta)
    for item in list(call.users):
        item.replace_all_uses_with(results[item.args[1]])
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)


def call_subgraph(
    graph: fx.Graph, body: fx.Node, inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> list[fx.Node]:
    """A call of the graph behind ``body`` (get_attr) with ``inputs``, for which Inductor makes code once however often
    it is called; nodes like ``results``, one for each that it returns.
    """
    call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, body.target, *inputs))
    call.meta["val"] = tuple(n.meta["val"] for n in results)
    items = []
    for i, node in enumerate(results):
        items.append(graph.call_function(operator.getitem, (call, i)))
        items[-1].meta.update({k: v for k, v in node.meta.items() if k in ("val", "tensor_meta")})
    return items


def keep_layouts(output: fx.Node) -> None:
    """Have Inductor return what a called graph returns with the strides of its fake values, which its callers rely
    on."""
    values = output.args[0]
    output.meta["user_visible_output_idxs"] = list(range(len(values)))
    output.meta["original_output_strides"] = [n.meta["val"].stride() for n in values]
