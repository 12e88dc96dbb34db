"""CPU kernels of the scaled, masked softmax of torch_npu.

What a masked score becomes the documentation does not say; taken as -10000, the value of Megatron's kernel, which it
replaces.
"""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation

FILL = -10000.0


def _setup(ctx, inputs, output):
    _, mask, ctx.scale, ctx.fixed = inputs
    ctx.save_for_backward(output, mask)


def _backward(ctx, grad):
    y, mask = ctx.saved_tensors
    return torch.ops.npu.npu_scaled_masked_softmax_backward(grad, y, mask, ctx.scale, ctx.fixed), None, None, None


def _mask(mask, x, fixed_triu_mask):
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1) if fixed_triu_mask else mask


@emulation(
    "npu_scaled_masked_softmax", lambda x, mask, scale=1, fixed_triu_mask=False: torch.empty_like(x), _setup, _backward
)
def npu_scaled_masked_softmax(x, mask, scale=1, fixed_triu_mask=False):
    """softmax(scale * x, -10000 where masked); with ``fixed_triu_mask`` the mask is the strict upper triangle."""
    scores = (x.float() * scale).masked_fill(_mask(mask, x, fixed_triu_mask), FILL)
    return torch.empty_like(x).copy_(scores.softmax(-1))


@emulation(
    "npu_scaled_masked_softmax_backward", lambda y_grad, y, mask, scale, fixed_triu_mask: torch.empty_like(y_grad)
)
def npu_scaled_masked_softmax_backward(y_grad, y, mask, scale, fixed_triu_mask):
    g, p = y_grad.float(), y.float()
    dx = scale * p * (g - (g * p).sum(-1, keepdim=True))
    return torch.empty_like(y_grad).copy_(dx.masked_fill(_mask(mask, y, fixed_triu_mask), 0.0))
