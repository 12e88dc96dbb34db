"""One AdamW step of a flat buffer: moments, weights in float32 and their 16-bit copy, in one read and one write of
each.

Source: Loshchilov and Hutter 2019, "Decoupled weight decay regularization", as ``torch.optim.AdamW`` computes it;
Megatron's distributed optimizer, whose float32 weights, kept apart from the 16-bit ones of the model, take the step and
are copied after it. torch's ``_fused_adamw_``, which torch_npu has, knows no such copy and wants gradients in the type
of the weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_fx.kernels import triton


def adamw_(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    grad_scale: float = 1.0,
) -> None:
    """One step, in place; on cuda and npu one Triton kernel, elsewhere torch's operators.

    Args:
        weight, exp_avg, exp_avg_sq: [n], contiguous, float; float32 for the kernel.
        grad: [n], contiguous, any float.
        copy: [n], contiguous: what ``weight`` is cast to after the step; or None.
        step: number of this step, from 1.
        grad_scale: factor on ``grad``, such as that of clipping.

    Raises:
        ValueError: buffers of different lengths, or not flat and contiguous; a step below 1.
    """
    arguments = {"weight": weight, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "copy": copy}
    for name, x in arguments.items():
        if x is not None and (x.dim() != 1 or len(x) != len(weight) or not x.is_contiguous()):
            raise ValueError(
                f"adamw_: {name} is {list(x.shape)} with strides {list(x.stride())}; valid: [{len(weight)}], contiguous"
            )
    if step < 1:
        raise ValueError(f"adamw_: step is {step}; valid: from 1")
    beta1, beta2 = betas
    correction = math.sqrt(1 - beta2**step)
    numbers = (lr / (1 - beta1**step), 1 - lr * weight_decay, beta1, beta2, eps, 1 / correction, grad_scale)
    if unable(weight, grad, exp_avg, exp_avg_sq, copy) is None:
        triton.load(triton.PARTS["adamw"])(weight, grad, exp_avg, exp_avg_sq, copy, *numbers)
    else:
        _step(weight, grad, exp_avg, exp_avg_sq, copy, *numbers)


def unable(weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None) -> str | None:
    """Why the kernel does not take these; None when it does."""
    for name, x in (("weight", weight), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if x.dtype != torch.float32:
            return f"{name} is {x.dtype}".replace("torch.", "")
    return triton.refuse_types(1, grad=grad, copy=copy) or triton.unable(weight.device)


def _step(weight, grad, exp_avg, exp_avg_sq, copy, rate, decay, beta1, beta2, eps, correction, grad_scale):
    """The definition. ``rate``: the learning rate over the first moment's correction; ``correction``: one over the root
    of the second's.
    """
    g = grad.to(weight.dtype) * grad_scale
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    weight.mul_(decay).addcdiv_(exp_avg, exp_avg_sq.sqrt().mul_(correction).add_(eps), value=-rate)
    if copy is not None:
        copy.copy_(weight)
