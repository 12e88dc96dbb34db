"""Gated linear units other than SwiGLU: ``activation(gate) * up``.

Source: Shazeer 2020, "GLU Variants Improve Transformer" (GeGLU, ReGLU, GLU); ``npu_geglu`` of torch_npu. Computed in
float32 for 16-bit inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import swiglu, triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "sigmoid")


def _activate(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == "relu":
        return torch.relu(x)
    if activation == "sigmoid":
        return torch.sigmoid(x)
    raise ValueError(f"mindspeed::glu: activation is {activation!r}; valid: {', '.join(ACTIVATIONS)}")


def _through(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """``grad`` times the activation's derivative. ReLU passes nothing where x is not above zero, be ``grad`` infinite
    or NaN, and all of it where x is NaN, as PyTorch does."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, x, 0)
    return grad * _derivative(x, activation)


def _derivative(x: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if activation == "gelu_tanh":
        root = math.sqrt(2 / math.pi)
        t = torch.tanh(root * (x + 0.044715 * x * x * x))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)
    s = torch.sigmoid(x)
    return s * (1 - s)


def _fake(x, up, activation):
    return swiglu.fake(x, up)


@operator("glu(Tensor x, Tensor? up, str activation) -> Tensor", _fake, tags=("activation",))
def glu(x: Tensor, up: Tensor | None, activation: str) -> Tensor:
    """Gated linear unit.

    Args:
        x: gate [..., ffn], or gate and up packed [..., 2 * ffn] when ``up`` is None.
        up: [..., ffn], the shape of the gate, or None.
        activation: "gelu" (erf), "gelu_tanh", "relu" or "sigmoid".

    Returns:
        [..., ffn], contiguous, in the type of the inputs.

    Raises:
        ValueError: unknown activation.
    """
    gate, up = swiglu.halves(x, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    wide = gate.to(accumulation_dtype(dtype))
    return (_activate(wide, activation) * up.to(wide.dtype)).to(dtype).contiguous()


def _fake_backward(grad, x, up, activation):
    return swiglu.fake_backward(grad, x, up)


@operator("glu_backward(Tensor grad, Tensor x, Tensor? up, str activation) -> (Tensor, Tensor)", _fake_backward)
def glu_backward(grad: Tensor, x: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dup) of :func:`glu`: dgate = grad * up * activation'(gate), dup = grad * activation(gate);
    packed inputs have one packed gradient and an empty ``dup``."""
    gate, u = swiglu.halves(x, up)
    dtype = accumulation_dtype(torch.promote_types(gate.dtype, u.dtype))
    g, wide, u = grad.to(dtype), gate.to(dtype), u.to(dtype)
    dgate, dup = _through(g * u, wide, activation), g * _activate(wide, activation)
    if up is None:
        return torch.cat((dgate.to(x.dtype), dup.to(x.dtype)), -1), x.new_empty(0)
    return dgate.to(x.dtype).contiguous(), dup.to(up.dtype).contiguous()


def _setup(ctx, inputs, output):
    x, up, ctx.activation = inputs
    ctx.save_for_backward(x, up)


def _backward(ctx, grad):
    x, up = ctx.saved_tensors
    dx, dup = torch.ops.mindspeed.glu_backward(grad, x, up, ctx.activation)
    return dx if ctx.needs_input_grad[0] else None, dup if up is not None and ctx.needs_input_grad[1] else None, None


torch.library.register_autograd("mindspeed::glu", _backward, setup_context=_setup, lib=LIBRARY)


@glu.costs
def _cost(out, x, up, activation):
    return once(out, x, up, vector=(1 if activation == "relu" else SPECIAL) * out.numel + out.numel)


@glu_backward.costs
def _backward_cost(out, grad, x, up, activation):
    """Two special functions for GELU (the value and its derivative share one of sigmoid's)."""
    special = {"relu": 0, "sigmoid": SPECIAL}.get(activation, 2 * SPECIAL)
    return once(out, grad, x, up, vector=(special + 8) * grad.numel)


glu.shard(swiglu.gate_strategies)
glu_backward.shard(swiglu.ways_backward)


triton.kernel(
    glu,
    _fake,
    "glu.forward",
    "one read",
    lambda x, up, activation: triton.refuse(x.shape[-1], x=x, up=up),
    beats_codegen=False,
)
triton.kernel(
    glu_backward,
    _fake_backward,
    "glu.backward",
    "both gradients in one read",
    lambda grad, x, up, activation: triton.refuse(x.shape[-1], grad=grad, x=x, up=up),
    beats_codegen=lambda grad, x, up, activation: triton.small(x) if up is None else triton.APART,
)
