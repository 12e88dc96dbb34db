"""CPU kernels of the norms and of the rotary embedding of torch_npu."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation

# --------------------------------------------------------------------------- RMSNorm


def _rstd_shape(x, gamma):
    kept = x.dim() - gamma.dim()
    return (*x.shape[:kept], *([1] * gamma.dim()))


def _fake_norm(input, gamma, epsilon=1e-6):
    return torch.empty_like(input), input.new_empty(_rstd_shape(input, gamma), dtype=torch.float32)


def _setup_norm(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _backward_norm(ctx, grad, _grad_rstd):
    x, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(grad, x, gamma, rstd)
    return dx, dgamma.to(gamma.dtype), None


@emulation("npu_rms_norm", _fake_norm, _setup_norm, _backward_norm)
def npu_rms_norm(input, gamma, epsilon=1e-6):
    """(y, rstd): y = x * rstd * gamma in float32, rounded once; rstd float32, one per row, over the dimensions of
    gamma.
    """
    assert input.dtype == gamma.dtype, f"npu_rms_norm: input is {input.dtype}, gamma {gamma.dtype}"
    wide = input.float()
    rstd = torch.rsqrt(wide.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    return torch.empty_like(input).copy_(wide * rstd * gamma.float()), rstd


@emulation(
    "npu_rms_norm_backward",
    lambda dy, input, gamma, rstd: (torch.empty_like(input), torch.empty_like(gamma, dtype=torch.float32)),
)
def npu_rms_norm_backward(dy, input, gamma, rstd):
    """(dx, dgamma), dgamma always in float32."""
    normal, grad = input.float() * rstd, dy.float()
    h = grad * gamma.float()
    dx = rstd * (h - normal * (h * normal).mean(tuple(range(-gamma.dim(), 0)), keepdim=True))
    return torch.empty_like(input).copy_(dx), (grad * normal).reshape(-1, *gamma.shape).sum(0)


def _fake_add_norm(x1, x2, gamma, epsilon=1e-6):
    return (*_fake_norm(x1, gamma), torch.empty_like(x1))


@emulation("npu_add_rms_norm", _fake_add_norm)
def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """(y, rstd, x1 + x2): the norm of the sum as it is returned, rounded."""
    total = torch.empty_like(x1).copy_(x1 + x2)
    return (*npu_rms_norm(total, gamma, epsilon), total)
