"""Operators that no pass of the default level puts on a CUDA device, called by themselves: products of 8-bit operands,
the mixing of residual streams, causal convolution.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch

from .problem import Function, Problem, new, size


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Function:
    """``forward(*leaves)`` with the gradients that ``backward(grad, result, *leaves)`` returns."""

    class Of(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *leaves):
            out = forward(*leaves)
            ctx.save_for_backward(out, *leaves)
            return out

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return Of.apply


def linear_fp8(device: str, recipe: str, tokens: int = 8192, inputs: int = 4096, outputs: int = 14336) -> Problem:
    """A linear layer; the rival rounds its operands to 8 bits, which its distance from the exact result shows."""
    from mindspeed_fx.kernels import linear_fp8 as fp8

    x, w = new(tokens, inputs, device=device), new(outputs, inputs, device=device)
    forward, backward = fp8.forward_by(fp8.scaled_mm), fp8.backward_by(fp8.scaled_mm)
    layer = differentiable(
        torch.compile(lambda x, w: forward(x, w, recipe), dynamic=False),
        torch.compile(lambda grad, _, x, w: backward(grad, x, w, recipe, [True, True]), dynamic=False),
    )
    flop = 2 * tokens * inputs * outputs
    return Problem(lambda x, w: x @ w.t(), [x, w], flop=(flop, 2 * flop), rivals={"8 bits": layer}, exact=torch.float32)


def sinkhorn_knopp(device: str, tokens: int = 2**18, streams: int = 4, iterations: int = 20) -> Problem:
    """Divisions by sums of rows and columns in turn, as transformers' DeepSeek-V4 spells them."""

    def define(x):
        comb = torch.softmax(x, dim=-1) + 1e-6
        comb = comb / (comb.sum(dim=-2, keepdim=True) + 1e-6)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + 1e-6)
        return comb

    import mindspeed_fx.kernels  # noqa: F401  registers the operators

    ops = torch.ops.mindspeed
    own = differentiable(
        lambda x: ops.sinkhorn_knopp_triton(x, iterations, 1e-6),
        lambda grad, _, x: ops.sinkhorn_knopp_backward_triton(grad, x, iterations, 1e-6),
    )
    x = torch.randn(tokens, streams, streams, device=device)
    return Problem(define, [x], moved=(2 * size(x), 3 * size(x)), rivals={"operator": own})


def causal_conv1d(device: str, tokens: int = 4096, channels: int = 4096, batch: int = 4) -> Problem:
    """Depthwise, four weights, SiLU, as transformers' Mamba-2 has it; the sequence is a transposed part of a
    projection.
    """

    from mindspeed_fx.kernels.triton import load

    def define(x, weight, bias):
        from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

        return causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)

    def backward(grad, _, x, weight, bias):
        dx, *others = load("causal_conv1d.backward")(grad.transpose(1, 2), x.transpose(1, 2), weight, bias, True)
        return dx.transpose(1, 2), *others

    own = differentiable(
        lambda x, weight, bias: load("causal_conv1d.forward")(x.transpose(1, 2), weight, bias, True).transpose(1, 2),
        backward,
    )
    x = new(batch, tokens, channels, device=device)
    leaves = [x, new(channels, 4, device=device), new(channels, device=device)]
    return Problem(define, leaves, moved=(2 * size(x), 3 * size(x)), rivals={"operator": own})


PROBLEMS = {
    "causal_conv1d": causal_conv1d,
    "causal_conv1d 1024": partial(causal_conv1d, tokens=1024, batch=2),
    "linear_fp8 row": partial(linear_fp8, recipe="row"),
    "linear_fp8 tensor": partial(linear_fp8, recipe="tensor"),
    "sinkhorn_knopp": sinkhorn_knopp,
}
