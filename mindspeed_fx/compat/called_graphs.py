"""Graphs that a graph calls, of which Inductor makes code once: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
import operator
from typing import Any, Sequence

import torch
import torch.fx as fx


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


def has_options(region: fx.GraphModule) -> bool:
    """Whether a region that the caller marked is to be compiled with options of its own
    (``nested_compile_region(options=...)``)."""
    return region.meta.get("nested_region_config") is not None


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
