"""Clipped SwiGLU: ``g * sigmoid(alpha * g) * (u + offset)``, g = min(gate, limit), u = clamp(up, -limit, limit).

Source: gpt-oss (alpha 1.702, limit 7, offset 1, gate and up in alternating columns); ``activation_func_clamp_value``
and ``glu_linear_offset`` of Megatron-LM; ``npu_clipped_swiglu`` of torch_npu. Computed in float32 for 16-bit inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import REPLICATED, Even
from mindspeed_fx.cost.operators import SPECIAL, once
from mindspeed_fx.kernels import swiglu
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator

SETTINGS = "float alpha, float limit, float offset, bool interleaved"


def _pair(x: Tensor, up: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    return (x[..., ::2], x[..., 1::2]) if up is None and interleaved else swiglu.halves(x, up)


@operator(
    f"clipped_swiglu(Tensor x, Tensor? up, {SETTINGS}) -> Tensor",
    lambda x, up, *settings: swiglu.fake(x, up),
    tags=("activation",),
)
def clipped_swiglu(
    x: Tensor, up: Tensor | None, alpha: float, limit: float, offset: float, interleaved: bool
) -> Tensor:
    """Clipped SwiGLU.

    Args:
        x: gate [..., ffn], or gate and up packed [..., 2 * ffn] when ``up`` is None.
        up: [..., ffn], the shape of the gate, or None.
        alpha: factor inside the sigmoid.
        limit: bound on gate from above, on up from both sides.
        offset: added to up.
        interleaved: packed columns alternate gate, up, gate, up; else halves [gate | up].

    Returns:
        [..., ffn], contiguous, in the type of the inputs.
    """
    gate, up = _pair(x, up, interleaved)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    g, u = gate.to(accumulation_dtype(dtype)).clamp(max=limit), up.to(accumulation_dtype(dtype)).clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * (u + offset)).to(dtype).contiguous()


@operator(
    f"clipped_swiglu_backward(Tensor grad, Tensor x, Tensor? up, {SETTINGS}) -> (Tensor, Tensor)",
    lambda grad, x, up, *settings: swiglu.fake_backward(grad, x, up),
)
def clipped_swiglu_backward(
    grad: Tensor, x: Tensor, up: Tensor | None, alpha: float, limit: float, offset: float, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dup) of :func:`clipped_swiglu`; packed inputs have one packed gradient and an empty ``dup``.

    With s = sigmoid(alpha g): dgate = grad (u + offset) s (1 + alpha g (1 - s)) and dup = grad g s, zero where clipped.
    """
    gate, v = _pair(x, up, interleaved)
    dtype = accumulation_dtype(torch.promote_types(gate.dtype, v.dtype))
    grad, gate, v = (t.to(dtype) for t in (grad, gate, v))
    g, u = gate.clamp(max=limit), v.clamp(-limit, limit)
    s = torch.sigmoid(alpha * g)
    dgate = (grad * (u + offset) * s * (1 + alpha * g * (1 - s))).where(gate <= limit, 0)
    dup = (grad * (g * s)).where(v.abs() <= limit, 0)
    if up is not None:
        return dgate.to(x.dtype).contiguous(), dup.to(up.dtype).contiguous()
    pair = dgate.to(x.dtype), dup.to(x.dtype)
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), x.new_empty(0)


def _setup(ctx, inputs, output):
    x, up, *ctx.settings = inputs
    ctx.save_for_backward(x, up)


def _backward(ctx, grad):
    x, up = ctx.saved_tensors
    dx, dup = torch.ops.mindspeed.clipped_swiglu_backward(grad, x, up, *ctx.settings)
    return (
        dx if ctx.needs_input_grad[0] else None,
        dup if up is not None and ctx.needs_input_grad[1] else None,
        None,
        None,
        None,
        None,
    )


torch.library.register_autograd("mindspeed::clipped_swiglu", _backward, setup_context=_setup, lib=LIBRARY)


@clipped_swiglu.shard
def _sharding_rule(x, up, alpha, limit, offset, interleaved):
    """Alternating columns may be divided between pairs."""
    last = x.ndim - 1
    return swiglu.gate_strategies(x, up) + (
        [([Even(last)], [Even(last, 2), last])] if up is None and interleaved else []
    )


@clipped_swiglu_backward.shard
def _sharding_rule_backward(grad, x, up, alpha, limit, offset, interleaved):
    last = x.ndim - 1
    return swiglu.ways_backward(grad, x, up) + (
        [([Even(last, 2), REPLICATED], [Even(last), Even(last, 2), last])] if up is None and interleaved else []
    )


@clipped_swiglu.costs
def _cost(out, x, up, alpha, limit, offset, interleaved):
    return once(out, x, up, vector=(SPECIAL + 7) * out.numel)


@clipped_swiglu_backward.costs
def _backward_cost(out, grad, x, up, alpha, limit, offset, interleaved):
    return once(out, grad, x, up, vector=(SPECIAL + 17) * grad.numel)
