"""Biases of single linears of a model whose others have none (``--disable-bias-linear``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def add_to_rows(linear: Any) -> None:
    """Give a RowParallelLinear a bias of zeros, which it adds itself, if it has none."""
    if linear.bias is None:
        linear.bias = _zeros(linear, linear.output_size)
        linear.bias.sequence_parallel = linear.sequence_parallel  # gradients of a rank's own tokens, to be added up
        linear.skip_bias_add = False


def add_to_columns(linear: Any) -> None:
    """Give a ColumnParallelLinear a bias of zeros, of which a rank holds its part, if it has none."""
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    if linear.bias is None:
        linear.bias = _zeros(linear, linear.output_size_per_partition)
        set_tensor_model_parallel_attributes(linear.bias, True, 0, 1)


def _zeros(linear: Any, size: int) -> nn.Parameter:
    bias = nn.Parameter(torch.zeros(size, dtype=linear.config.params_dtype, device=torch.cuda.current_device()))
    bias.allreduce = True
    return bias
