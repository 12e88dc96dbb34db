"""Dynamo graph -> the canonical pre-autograd graph that matchers read."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.capture.normalize import normalize
from mindspeed_fx.capture.trace import CaptureError, example_value, trace
from mindspeed_fx.capture.transforms import isolate, keeps_writes
from mindspeed_fx.compat import fake, fx_graph, tracing
from mindspeed_fx.graph.annotate import bodies
from mindspeed_fx.graph.functional_writes import make_writes_functional
from mindspeed_fx.graph.writes import written_by

__all__ = ["CaptureError", "capture", "capture_backwards", "explain_unread", "isolate", "keeps_writes"]


def capture(gm: fx.GraphModule, values: list[Any] | None = None) -> fx.GraphModule:
    """The canonical form of a Dynamo graph: ATen operators before autograd, one spelling for each meaning.

    Values, gradients, aliasing, mutation, random numbers and autocast are those of ``gm``, which stays as it is.

    Args:
        values: of the placeholders, as :func:`trace` takes them.
    """
    return normalize(trace(gm, values))


def capture_backwards(gm: fx.GraphModule) -> None:
    """Give every ``autograd.Function`` of a captured graph that stayed whole a captured backward, too: Dynamo hands it
    over in calls of torch's functions and methods, which no rule for divided values names."""
    for graph in (gm, *bodies(gm)):
        for node in [n for n in graph.graph.nodes if tracing.is_autograd_function(n.target)]:
            name = node.args[1].target
            setattr(graph, name, _captured_backward(getattr(graph, name)))


def _captured_backward(gm: fx.GraphModule) -> fx.GraphModule:
    # before torch 2.12 the first input stands for the context: nothing reads it, and it has no value
    inputs = gm.graph.find_nodes(op="placeholder")
    captured = capture(gm, [example_value(n) if n.users or "example_value" in n.meta else None for n in inputs])
    make_writes_functional(captured)
    return captured


def explain_unread(gm: fx.GraphModule, own: Sequence[fx.Node] | None = None) -> str | None:
    """Why a Dynamo graph cannot be read as operators on plain tensors, in one sentence; None where it can be.

    Args:
        own: inputs of a body that nothing outside reads; None: ``gm`` is no body.
    """
    own = gm.graph.find_nodes(op="placeholder") if own is None else own
    if reason := _explain_data(gm, own):
        return reason
    for node in gm.graph.nodes:
        body = getattr(gm, node.target, None) if node.op == "get_attr" and "." not in node.target else None
        if isinstance(body, fx.GraphModule) and (reason := explain_unread(body, _own_inputs(body, node, own))):
            return reason
        for value in pytree.tree_leaves(fx_graph.example_value_of(node)):
            if tracing.wraps_tensors(value):
                what = f"{type(value).__name__} ({node.name})"
                return f"the graph computes with {what}, a tensor with operators of its own, and is not captured"
            if tracing.is_backward_state(value):
                return "the graph puts hooks on tensors, which run in the backward, and is not captured"
    return None


def _own_inputs(body: fx.GraphModule, node: fx.Node, own: Sequence[fx.Node]) -> list[fx.Node]:
    """Inputs of a checkpointed region, which ``node`` stands for, that are those of ``own`` and that it alone reads."""
    call = next(iter(node.users), None)
    if call is None or len(node.users) > 1 or not tracing.is_checkpoint(call.target):
        return []
    operands = zip(body.graph.find_nodes(op="placeholder"), call.args[1:])
    return [n for n, a in operands if a in own and len(a.users) == 1 and call.args.count(a) == 1]


def _explain_data(gm: fx.GraphModule, own: Sequence[fx.Node]) -> str | None:
    """Why ``tensor.data`` of a graph cannot be read as ``tensor.detach()``: what is written through it, or assigned to
    it, does not count as a new version of the tensor, and no operator says so. (Of an input that nothing has read yet,
    as a weight that is clipped before its use, nobody has a version of before.)"""
    data: set[int] = set()
    readers: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" and node.op != "call_method":
            continue
        if tracing.is_data_assignment(node.target):
            return f"the graph assigns to .data of a tensor ({node.args[0]}), and is not captured"
        if tracing.is_data(node.target):
            data |= _memory(node)
            continue
        changed = data and data & _memory(*written_by(node))
        if changed and (changed - _memory(*own) or changed & _memory(*(n.all_input_nodes for n in readers))):
            return f"the graph writes a tensor through .data ({node.name}), and is not captured"
        readers += [] if changed else [node]
    return None


def _memory(*nodes: Any) -> set[int]:
    """Storages of fake values."""
    values = pytree.tree_leaves(fx.map_arg(nodes, fx_graph.example_value_of))
    return {fake.storage_of(v) for v in values if isinstance(v, torch.Tensor)}
