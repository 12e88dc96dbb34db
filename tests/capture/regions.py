"""What tests of regions, marked or not, share."""

from __future__ import annotations

import inspect

import pytest
import torch

needs_reuse = pytest.mark.skipif(
    "max_reuse_entries" not in inspect.signature(torch.compiler.nested_compile_region).parameters,
    reason="this torch reads every region",
)


def step(model, call, x):
    """The loss that a call returns, and every gradient; random numbers are those of every other step."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = call(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]
