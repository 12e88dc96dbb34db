"""Dynamo graph -> the canonical pre-autograd graph that matchers read."""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx import compat_tracing
from mindspeed_fx.capture.normalize import normalize
from mindspeed_fx.capture.trace import trace


def refusal(gm: fx.GraphModule) -> str | None:
    """Why ``gm`` stays as Dynamo made it, or None: tracing again inside a function transform would record its wrappers."""
    found = next((n for n in gm.graph.nodes if n.op == "call_function" and compat_tracing.is_function_transform(n.target)), None)
    return f"the graph applies a function transform of torch.func ({found.name}) and is not captured" if found else None


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """The canonical form of a Dynamo graph: ATen operators before autograd, one spelling for each meaning.

    Values, gradients, aliasing, mutation, random numbers and autocast are those of ``gm``.
    """
    return normalize(trace(gm))
