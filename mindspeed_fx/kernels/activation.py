"""Activations whose gradient needs their input alone: squared ReLU ``relu(x)^2`` and quick GELU ``x * sigmoid(1.702
x)``.

Source: So et al. 2021, "Primer" (squared ReLU); Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (the sigmoid
form, as CLIP and GPT-2's descendants use it; ``npu_fast_gelu`` of torch_npu). Computed in float32 for 16-bit inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

KINDS = ("squared_relu", "quick_gelu")
SLOPE = 1.702


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"mindspeed::activation: kind is {kind!r}; valid: {', '.join(KINDS)}")


@operator(
    "activation(Tensor x, str kind) -> Tensor",
    lambda x, kind: torch.empty(x.shape, dtype=x.dtype, device=x.device),
    tags=("activation",),
)
def activation(x: Tensor, kind: str) -> Tensor:
    """relu(x)^2 or x * sigmoid(1.702 x).

    Args:
        x: any shape, float.
        kind: "squared_relu" or "quick_gelu".

    Returns:
        The shape and type of ``x``, contiguous.

    Raises:
        ValueError: unknown kind.
    """
    _check(kind)
    wide = x.to(accumulation_dtype(x.dtype))
    y = torch.relu(wide).square() if kind == "squared_relu" else wide * torch.sigmoid(SLOPE * wide)
    return y.to(x.dtype).contiguous()


@operator(
    "activation_backward(Tensor grad, Tensor x, str kind) -> Tensor",
    lambda grad, x, kind: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
def activation_backward(grad: Tensor, x: Tensor, kind: str) -> Tensor:
    """Gradient of :func:`activation`: 2 grad x if x > 0, or grad s (1 + 1.702 x (1 - s)) with s = sigmoid(1.702 x)."""
    _check(kind)
    g, wide = (t.to(accumulation_dtype(x.dtype)) for t in (grad, x))
    if kind == "squared_relu":
        # Zero where x is negative, whatever comes from above: a NaN, too.
        return torch.ops.aten.threshold_backward(2 * g * wide, wide, 0).to(x.dtype).contiguous()
    s = torch.sigmoid(SLOPE * wide)
    return (g * s * (1 + SLOPE * wide * (1 - s))).to(x.dtype).contiguous()


def _setup(ctx, inputs, output):
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _backward(ctx, grad):
    return torch.ops.mindspeed.activation_backward(grad, *ctx.saved_tensors, ctx.kind), None


torch.library.register_autograd("mindspeed::activation", _backward, setup_context=_setup, lib=LIBRARY)


@activation.shard
def _sharding_rule(x, kind):
    return [([d], [d]) for d in range(x.ndim)]


@activation_backward.shard
def _sharding_rule_backward(grad, x, kind):
    return [([d], [d, d]) for d in range(x.ndim)]


@activation.costs
def _cost(out, x, kind):
    return once(out, x, vector=(2 if kind == "squared_relu" else SPECIAL + 2) * x.numel)


@activation_backward.costs
def _backward_cost(out, grad, x, kind):
    return once(out, grad, x, vector=(3 if kind == "squared_relu" else SPECIAL + 6) * x.numel)
