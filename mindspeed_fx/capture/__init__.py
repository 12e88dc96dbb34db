"""Dynamo graph -> the canonical pre-autograd graph that matchers read."""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.capture.normalize import normalize
from mindspeed_fx.capture.trace import trace
from mindspeed_fx.capture.transforms import isolate


def refusal(gm: fx.GraphModule) -> str | None:
    """Why ``gm`` stays as Dynamo made it, or None; then its function transforms are bodies of their own."""
    return isolate(gm)


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """The canonical form of a Dynamo graph: ATen operators before autograd, one spelling for each meaning.

    Values, gradients, aliasing, mutation, random numbers and autocast are those of ``gm``.
    """
    return normalize(trace(gm))
