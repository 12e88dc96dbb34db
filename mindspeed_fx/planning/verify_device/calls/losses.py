"""Calls of cross-entropy, of logits and of the linear layer before them."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import normal
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def loss_cases(dtype: torch.dtype) -> Iterator[Call]:
    """Losses of logits and of hidden states."""
    target = torch.tensor([3, -100, 0, 9, -100, 1])
    logits = 3 * normal(6, 10, dtype=dtype)
    _, lse = ops.cross_entropy(logits, target, -100, 0.0)
    yield "cross_entropy", ops.cross_entropy, (logits, target, -100, 0.0), "npu_cross_entropy_loss"
    yield (
        "cross_entropy_backward",
        ops.cross_entropy_backward,
        (normal(6), logits, target, lse, -100, 0.0),
        "npu_cross_entropy_loss_backward",
    )
    hidden, weight, bias, chunks = (
        normal(11, 16, dtype=dtype),
        normal(20, 16, dtype=dtype),
        normal(20, dtype=dtype),
        "products and a Triton kernel, chunk by chunk",
    )
    settings = (bias, torch.randint(0, 20, (11,)), -1, 0.1, 1e-4, 5.0)
    yield (
        "linear_cross_entropy_total-chunks",
        ops.linear_cross_entropy_total,
        (hidden, weight, *settings, True, [True, True, True]),
        chunks,
    )
    yield "linear_cross_entropy_tokens-chunks", ops.linear_cross_entropy_tokens, (hidden, weight, *settings), chunks
    yield (
        "linear_cross_entropy_tokens_backward-chunks",
        ops.linear_cross_entropy_tokens_backward,
        (normal(11), hidden, weight, *settings, [True, True, True]),
        chunks,
    )
    if dtype == torch.float32:
        return
    hidden, weight, target = normal(11, 16, dtype=dtype), normal(130, 16, dtype=dtype), torch.randint(0, 130, (11,))
    target[2], target[7] = 129, -1
    for mean, needed in itertools.product(
        (True, False), ([True, True, False], [True, False, False], [False, True, False], [False, False, False])
    ):
        args = (hidden, weight, None, target, -1, 0.0, 0.0, 0.0, mean, needed)
        yield (
            f"linear_cross_entropy_total-{mean}-{needed}",
            ops.linear_cross_entropy_total,
            args,
            "npu_fused_linear_online_max_sum and its loss and backward",
        )
    args = (hidden, weight, None, target, -1, 0.0, 0.0, 0.0)
    yield (
        "linear_cross_entropy_tokens",
        ops.linear_cross_entropy_tokens,
        args,
        "npu_fused_linear_online_max_sum and its loss",
    )
    yield (
        "linear_cross_entropy_tokens_backward",
        ops.linear_cross_entropy_tokens_backward,
        (normal(11), *args, [True, True, False]),
        "npu_fused_linear_online_max_sum and its backward",
    )
    yield (
        "linear_cross_entropy_total_backward",
        ops.linear_cross_entropy_total_backward,
        (torch.tensor(2.0), hidden, weight, hidden.new_empty(0)),
        "aten products",
    )
