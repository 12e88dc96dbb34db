"""Calls of causal convolutions."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import normal
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def convolution_cases(dtype: torch.dtype) -> Iterator[Call]:
    """With and without bias and activation, sequences and channels last."""
    for has_bias, silu, channels_last in itertools.product((False, True), repeat=3):
        x = normal(2, 5, 9, dtype=dtype)
        x = x.transpose(1, 2).contiguous().transpose(1, 2) if channels_last else x
        weight, bias = normal(5, 4, dtype=dtype), normal(5, dtype=dtype) if has_bias else None
        name = f"{has_bias}-{silu}-{channels_last}"
        yield (
            f"causal_conv1d-{name}",
            ops.causal_conv1d,
            (x, weight, bias, silu),
            "triton, a tile of tokens and channels, read once for each weight",
        )
        yield (
            f"causal_conv1d_backward-{name}",
            ops.causal_conv1d_backward,
            (torch.randn_like(x), x, weight, bias, silu),
            "triton, the convolution the other way, and sums by tiles",
        )
