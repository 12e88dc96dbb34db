"""SwiGLU times a weight per token: ``silu(gate) * up * weight``, the experts' activation with the router's
probabilities.

Source: Megatron-LM's ``weighted_bias_swiglu_impl``. The backward keeps gate, up and the weights; the product that the
gradient of the weights needs is recomputed. Computed in float32 for 16-bit inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import swiglu
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator


@operator(
    "weighted_swiglu(Tensor x, Tensor? up, Tensor weight) -> Tensor",
    lambda x, up, weight: swiglu.fake(x, up),
    tags=("activation",),
)
def weighted_swiglu(x: Tensor, up: Tensor | None, weight: Tensor) -> Tensor:
    """silu(gate) * up * weight.

    Args:
        x: gate [..., ffn], or gate and up packed [..., 2 * ffn] when ``up`` is None.
        up: [..., ffn], the shape of the gate, or None.
        weight: [..., 1], float.

    Returns:
        [..., ffn], contiguous, in the type of gate and up.
    """
    gate, up = swiglu.halves(x, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    g, u, w = (t.to(accumulation_dtype(dtype)) for t in (gate, up, weight))
    return (g * torch.sigmoid(g) * u * w).to(dtype).contiguous()


def fake_backward(grad, x, up, weight):
    return *swiglu.fake_backward(grad, x, up), torch.empty(weight.shape, dtype=weight.dtype, device=x.device)


@operator(
    "weighted_swiglu_backward(Tensor grad, Tensor x, Tensor? up, Tensor weight) -> (Tensor, Tensor, Tensor)",
    fake_backward,
)
def weighted_swiglu_backward(
    grad: Tensor, x: Tensor, up: Tensor | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dx, dup, dweight) of :func:`weighted_swiglu`; packed inputs have one packed gradient and an empty
    ``dup``.
    """
    gate, v = swiglu.halves(x, up)
    dtype = accumulation_dtype(torch.promote_types(gate.dtype, v.dtype))
    grad, g, u = (t.to(dtype) for t in (grad, gate, v))
    s = torch.sigmoid(g)
    weighted = grad * weight.to(dtype)
    dgate, dup = weighted * u * s * (1 + g * (1 - s)), weighted * (g * s)
    dweight = (grad * (g * s) * u).sum(-1, keepdim=True).to(weight.dtype).contiguous()
    if up is None:
        return torch.cat((dgate.to(x.dtype), dup.to(x.dtype)), -1), x.new_empty(0), dweight
    return dgate.to(x.dtype).contiguous(), dup.to(up.dtype).contiguous(), dweight


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    grads = torch.ops.mindspeed.weighted_swiglu_backward(grad, *ctx.saved_tensors)
    return tuple(g if need else None for g, need in zip(grads, ctx.needs_input_grad))


torch.library.register_autograd("mindspeed::weighted_swiglu", _backward, setup_context=_setup, lib=LIBRARY)


@weighted_swiglu.shard
def strategies(x, up, weight):
    rows = [([d], [d, d, d]) for d in range(x.ndim - 1)]
    return rows if up is None else [*rows, ([x.ndim - 1], [x.ndim - 1, x.ndim - 1, REPLICATED])]


@weighted_swiglu_backward.shard
def strategies_backward(grad, x, up, weight):
    last = x.ndim - 1
    rows = [([d, REPLICATED if up is None else d, d], [d, d, d, d]) for d in range(last)]
    return rows if up is None else [*rows, ([last, last, PARTIAL], [last, last, last, REPLICATED])]


@weighted_swiglu.costs
def product_cost(out, x, up, weight):
    return once(out, x, up, weight, vector=(SPECIAL + 3) * out.numel)


@weighted_swiglu_backward.costs
def gradient_cost(out, grad, x, up, weight):
    return once(out, grad, x, up, weight, vector=(SPECIAL + 12) * grad.numel)
