"""CPU kernels of the activations of torch_npu."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation

SLOPE = 1.702


def _setup_fast_gelu(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward_fast_gelu(ctx, grad):
    return torch.ops.npu.npu_fast_gelu_backward(grad, *ctx.saved_tensors)


@emulation("npu_fast_gelu", lambda input: torch.empty_like(input), _setup_fast_gelu, _backward_fast_gelu)
def npu_fast_gelu(input):
    """x / (1 + exp(-1.702 x)), the formula of Atlas A2 and A3."""
    wide = input.float()
    return (wide * torch.sigmoid(SLOPE * wide)).to(input.dtype)


@emulation("npu_fast_gelu_backward", lambda grad, input: torch.empty_like(input))
def npu_fast_gelu_backward(grad, input):
    wide = input.float()
    s = torch.sigmoid(SLOPE * wide)
    return torch.empty_like(input).copy_(grad.float() * s * (1 + SLOPE * wide * (1 - s)))
