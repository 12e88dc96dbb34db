"""Dynamo graph -> the canonical pre-autograd graph that matchers read."""

from __future__ import annotations

import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.capture.normalize import normalize
from mindspeed_fx.capture.trace import CaptureError, trace
from mindspeed_fx.capture.transforms import isolate, writes_both_ways
from mindspeed_fx.compat import fx_graph, tracing

__all__ = ["CaptureError", "capture", "explain_unread", "isolate", "writes_both_ways"]


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """The canonical form of a Dynamo graph: ATen operators before autograd, one spelling for each meaning.

    Values, gradients, aliasing, mutation, random numbers and autocast are those of ``gm``, which stays as it is.
    """
    return normalize(trace(gm))


def explain_unread(gm: fx.GraphModule) -> str | None:
    """Why a Dynamo graph cannot be read as operators on plain tensors, in one sentence; None where it can be."""
    for node in gm.graph.nodes:
        body = getattr(gm, node.target, None) if node.op == "get_attr" and "." not in node.target else None
        if isinstance(body, fx.GraphModule) and (reason := explain_unread(body)):
            return reason
        for value in pytree.tree_leaves(fx_graph.example_value_of(node)):
            if tracing.wraps_tensors(value):
                what = f"{type(value).__name__} ({node.name})"
                return f"the graph computes with {what}, a tensor with operators of its own, and is not captured"
            if tracing.is_backward_state(value):
                return "the graph puts hooks on tensors, which run in the backward, and is not captured"
    return None
