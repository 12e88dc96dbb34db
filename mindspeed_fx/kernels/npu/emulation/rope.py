"""CPU kernels of the rotary embedding of torch_npu."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation

# --------------------------------------------------------------------------- rotary embedding


def _turn(x, mode):
    if mode == "interleave":
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def _setup_rotary(ctx, inputs, output):
    input, r1, r2, ctx.mode, _ = inputs
    ctx.save_for_backward(input, r1, r2)


def _backward_rotary(ctx, grad):
    input, r1, r2 = ctx.saved_tensors
    grads = torch.ops.npu.npu_rotary_mul_backward(grad, input, r1, r2, ctx.mode)
    return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad)), None, None


@emulation(
    "npu_rotary_mul",
    lambda input, r1, r2, rotary_mode="half", rotate=None: input.new_empty(input.shape),
    _setup_rotary,
    _backward_rotary,
)
def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    """r1 * input + r2 * turn(input), or input @ rotate in place of the turn; the result is contiguous."""
    assert input.dim() == 4 and rotary_mode in ("half", "interleave")
    wide = input.float()
    turned = _turn(wide, rotary_mode) if rotate is None else wide @ rotate.float()
    return (r1.float() * wide + r2.float() * turned).to(input.dtype).contiguous()


def _fake_rotary_backward(grad, input, r1, r2, rotary_mode="half"):
    return torch.empty_like(input), torch.empty_like(r1, dtype=input.dtype), torch.empty_like(r2, dtype=input.dtype)


@emulation("npu_rotary_mul_backward", _fake_rotary_backward)
def npu_rotary_mul_backward(grad, input, r1, r2, rotary_mode="half"):
    """(dx, dr1, dr2); the last two are only computed where both angles require gradients, and undefined elsewhere."""
    wide, x = grad.float(), input.float()
    dx = torch.empty_like(input).copy_(wide * r1.float() - _turn(wide * r2.float(), rotary_mode))
    if not (r1.requires_grad and r2.requires_grad):
        return (
            dx,
            torch.full_like(r1, float("nan"), dtype=input.dtype),
            torch.full_like(r2, float("nan"), dtype=input.dtype),
        )
    dr1, dr2 = (wide * x).sum_to_size(r1.shape), (wide * _turn(x, rotary_mode)).sum_to_size(r2.shape)
    return dx, dr1.to(input.dtype), dr2.to(input.dtype)
