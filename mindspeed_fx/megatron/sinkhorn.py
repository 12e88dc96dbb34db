"""Megatron's ``sinkhorn`` in a graph: it ends when the numbers say so, which a graph cannot.

With C = exp(cost) [n, m], a [n] and b [m] (b = 1 at first): a = 1 / (n (C b + eps)) and b = 1 / (m (C' a + eps)) in
turn, until the mean change of b is at most ``tol``; the result is a C b (Sinkhorn 1964).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import patches

TARGET = "transformer.moe.moe_utils:sinkhorn"
EPS = 1e-8


@torch.library.custom_op("mindspeed::sinkhorn", mutates_args=())
def sinkhorn(cost: Tensor, tol: float = 0.0001) -> Tensor:
    """Megatron's ``sinkhorn`` of router logits [tokens, experts]."""
    return patches.original(TARGET)(cost, tol)


@sinkhorn.register_fake
def _(cost: Tensor, tol: float = 0.0001) -> Tensor:
    return torch.empty_like(cost)


@torch.library.custom_op("mindspeed::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(grad: Tensor, cost: Tensor, tol: float) -> Tensor:
    """The gradient through all turns, from the last to the first."""
    c = torch.exp(cost)
    rows, columns = c.shape
    b, turns, change = torch.ones_like(c[0]), [], float("inf")
    while change > tol:
        before = b
        a = 1 / (rows * (c @ before + EPS))
        b = 1 / (columns * (a @ c + EPS))
        turns.append((a, before, b))
        change = float((before - b).abs().mean())
    of_a, of_b = (grad * c) @ b, a @ (grad * c)
    of_c = grad * a[:, None] * b
    for a, before, b in reversed(turns):
        of_sum = -of_b * columns * b.square()
        of_c = of_c + a[:, None] * of_sum
        of_a = of_a + c @ of_sum
        of_sum = -of_a * rows * a.square()
        of_c = of_c + of_sum[:, None] * before
        of_a, of_b = torch.zeros_like(a), of_sum @ c
    return of_c * c


@sinkhorn_backward.register_fake
def _(grad: Tensor, cost: Tensor, tol: float) -> Tensor:
    return torch.empty_like(cost)


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    cost, ctx.tol = inputs
    ctx.save_for_backward(cost)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return sinkhorn_backward(grad, *ctx.saved_tensors, ctx.tol), None


sinkhorn.register_autograd(_backward, setup_context=_keep)
