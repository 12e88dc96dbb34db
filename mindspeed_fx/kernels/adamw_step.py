"""``mindspeed::adamw_step``: a step of AdamW on several parameters, as one call of a graph. See :mod:`adamw` for the
arithmetic.

What changes from step to step, the learning rate foremost, is in tensors, so that a schedule compiles nothing anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import Cost
from mindspeed_fx.kernels.adamw import adamw_
from mindspeed_fx.kernels.base import adopt

NUMBERS = ("lr", "beta1", "beta2", "eps", "weight_decay")


@torch.library.custom_op("mindspeed::adamw_step", mutates_args={"weights", "exp_avgs", "exp_avg_sqs", "steps"})
def adamw_step(
    weights: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    grads: list[Tensor],
    numbers: list[Tensor],
) -> None:
    """One step of every weight, in place.

    Args:
        weights, exp_avgs, exp_avg_sqs: contiguous, float; of the same shape, weight by weight.
        steps: [] float on cpu: how many steps were taken; one more afterwards.
        grads: of the shapes of the weights, any float.
        numbers: [5] float64 on cpu: see :data:`NUMBERS`.
    """
    with torch.no_grad():
        for weight, exp_avg, exp_avg_sq, step, grad, arg in zip(
            weights, exp_avgs, exp_avg_sqs, steps, grads, numbers, strict=True
        ):
            lr, beta1, beta2, eps, weight_decay = arg.tolist()
            step += 1
            flat = (t.view(-1) for t in (weight, grad.contiguous(), exp_avg, exp_avg_sq))
            adamw_(*flat, step=int(step.item()), lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)


@adamw_step.register_fake
def _(
    weights: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    grads: list[Tensor],
    numbers: list[Tensor],
) -> None:
    return None


@adopt(torch.ops.mindspeed.adamw_step.default, adamw_step).costs
def _cost(out: Any, weights: Any, exp_avgs: Any, exp_avg_sqs: Any, steps: Any, grads: Any, numbers: Any) -> Cost:
    """Weights and both moments are read and written, gradients read; a kernel for each weight."""
    state = sum(t.bytes for many in (weights, exp_avgs, exp_avg_sqs) for t in many)
    return Cost(
        0,
        0,
        14 * sum(w.numel for w in weights),
        state + sum(g.bytes for g in grads),
        state,
        "float32",
        "float32",
        len(weights),
    )
