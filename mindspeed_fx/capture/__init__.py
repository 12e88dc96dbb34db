"""Dynamo graph -> the canonical pre-autograd graph that matchers read."""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.capture.normalize import normalize
from mindspeed_fx.capture.trace import trace
from mindspeed_fx.capture.transforms import isolate

__all__ = ["capture", "isolate"]


def capture(gm: fx.GraphModule) -> fx.GraphModule:
    """The canonical form of a Dynamo graph: ATen operators before autograd, one spelling for each meaning.

    Values, gradients, aliasing, mutation, random numbers and autocast are those of ``gm``.
    """
    return normalize(trace(gm))
