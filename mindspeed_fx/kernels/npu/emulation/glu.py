"""CPU kernels of the gated linear units of torch_npu."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from mindspeed_fx.kernels.npu.emulation.registry import emulation


def _halve(x, dim):
    shape = list(x.shape)
    shape[dim] //= 2
    return x.new_empty(shape)


def _setup_swiglu(ctx, inputs, output):
    x, ctx.dim = inputs
    ctx.save_for_backward(x)


def _backward_swiglu(ctx, grad):
    return torch.ops.npu.npu_swiglu_backward(grad, ctx.saved_tensors[0], ctx.dim), None


@emulation("npu_swiglu", lambda input, dim=-1: _halve(input, dim), _setup_swiglu, _backward_swiglu)
def npu_swiglu(input, dim=-1):
    """silu(a) * b with a and b the halves of ``input`` along ``dim``."""
    a, b = input.float().chunk(2, dim)
    return (F.silu(a) * b).to(input.dtype).contiguous()


@emulation("npu_swiglu_backward", lambda grad_output, input, dim=-1: torch.empty_like(input))
def npu_swiglu_backward(grad_output, input, dim=-1):
    (a, b), g = input.float().chunk(2, dim), grad_output.float()
    s = torch.sigmoid(a)
    return torch.empty_like(input).copy_(torch.cat((g * b * s * (1 + a * (1 - s)), g * a * s), dim))


def _gelu(x, approximate):
    return F.gelu(x, approximate="tanh" if approximate else "none")


def _split(x, dim, activate_left):
    """(activated half, other half)."""
    left, right = x.chunk(2, dim)
    return (left, right) if activate_left else (right, left)


def _setup_geglu(ctx, inputs, output):
    x, *ctx.settings = inputs
    ctx.save_for_backward(x, output[1])


def _backward_geglu(ctx, grad, _grad_gelu):
    x, gelu = ctx.saved_tensors
    return torch.ops.npu.npu_geglu_grad(grad, x, gelu, *ctx.settings), None, None, None


@emulation(
    "npu_geglu",
    lambda input, dim=-1, approximate=1, activate_left=False: (_halve(input, dim), _halve(input, dim)),
    _setup_geglu,
    _backward_geglu,
)
def npu_geglu(input, dim=-1, approximate=1, activate_left=False):
    """(gelu(activated half) * other half, gelu(activated half)); approximate 1 is tanh, 0 is erf; the right half is
    activated unless ``activate_left``."""
    gate, other = _split(input.float(), dim, activate_left)
    gelu = _gelu(gate, approximate)
    return (gelu * other).to(input.dtype).contiguous(), gelu.to(input.dtype).contiguous()


def fake_geglu_grad(grad_output, input, gelu, dim=-1, approximate=1, activate_left=False):
    return torch.empty_like(input)


@emulation("npu_geglu_grad", fake_geglu_grad)
def npu_geglu_grad(grad_output, input, gelu, dim=-1, approximate=1, activate_left=False):
    (gate, other), g = _split(input.float(), dim, activate_left), grad_output.float()
    if approximate:
        root = math.sqrt(2 / math.pi)
        t = torch.tanh(root * (gate + 0.044715 * gate**3))
        slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t * t) * root * (1 + 3 * 0.044715 * gate * gate)
    else:
        slope = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5))) + gate * torch.exp(-0.5 * gate * gate) / math.sqrt(
            2 * math.pi
        )
    dgate, dother = g * other * slope, g * gelu.float()
    return torch.empty_like(input).copy_(torch.cat((dgate, dother) if activate_left else (dother, dgate), dim))
