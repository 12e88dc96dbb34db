"""CPU kernels of the norms and of the rotary embedding of torch_npu."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulate import emulation

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
    """(y, rstd): y = x * rstd * gamma in float32, rounded once; rstd float32, one per row, over the dimensions of gamma."""
    assert input.dtype == gamma.dtype, f"npu_rms_norm: input is {input.dtype}, gamma {gamma.dtype}"
    wide = input.float()
    rstd = torch.rsqrt(wide.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    return torch.empty_like(input).copy_(wide * rstd * gamma.float()), rstd


@emulation("npu_rms_norm_backward", lambda dy, input, gamma, rstd: (torch.empty_like(input), torch.empty_like(gamma, dtype=torch.float32)))
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


def _fake_add_layer_norm(x1, x2, gamma, beta, epsilon=1e-5, additional_output=False):
    stats = (x1.new_empty(_rstd_shape(x1, gamma), dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x1), *stats, torch.empty_like(x1)


@emulation("npu_add_layer_norm", _fake_add_layer_norm)
def npu_add_layer_norm(x1, x2, gamma, beta, epsilon=1e-5, additional_output=False):
    """(y, mean, rstd, x1 + x2), statistics in float32; the last is undefined unless asked for."""
    total = torch.empty_like(x1).copy_(x1 + x2)
    y, mean, rstd = torch.native_layer_norm(total.float(), gamma.shape, gamma.float(), beta.float(), epsilon)
    return torch.empty_like(x1).copy_(y), mean, rstd, total if additional_output else torch.full_like(x1, float("nan"))


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


@emulation("npu_rotary_mul", lambda input, r1, r2, rotary_mode="half", rotate=None: input.new_empty(input.shape), _setup_rotary, _backward_rotary)
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
        return dx, torch.full_like(r1, float("nan"), dtype=input.dtype), torch.full_like(r2, float("nan"), dtype=input.dtype)
    dr1, dr2 = (wide * x).sum_to_size(r1.shape), (wide * _turn(x, rotary_mode)).sum_to_size(r2.shape)
    return dx, dr1.to(input.dtype), dr2.to(input.dtype)
