"""A call of the step of an optimizer."""

from __future__ import annotations

from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import normal
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed
ON_THE_HOST = {"mindspeed.adamw_step": ("steps", "numbers")}
"""Arguments that lie on the processor wherever the others do."""


def step_cases(dtype: torch.dtype) -> Iterator[Call]:
    """AdamW on several weights in float32 with gradients of another type, at a first step and at a later one."""
    shapes = ((3, 5), (7,), (2, 3, 4))
    for taken in (0, 9):
        weights, exp_avgs = ([normal(*shape) for shape in shapes] for _ in range(2))
        exp_avg_sqs = [normal(*shape).square() for shape in shapes]
        steps = [torch.tensor(float(taken)) for _ in shapes]
        grads = [normal(*shape, dtype=dtype) for shape in shapes]
        numbers = [torch.tensor([1e-2, 0.9, 0.95, 1e-8, 0.1], dtype=torch.float64) for _ in shapes]
        yield f"adamw_step-{taken}", ops.adamw_step, (weights, exp_avgs, exp_avg_sqs, steps, grads, numbers), ""
