"""Small parts of DeepSeek-V4's layers: linears without tensor parallelism, norms in float32 or better."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(config: Any, inputs: int, outputs: int, is_local: bool) -> nn.Linear:
    """All of it on every tensor-parallel rank, without a bias.

    Args:
        config: Megatron's TransformerConfig.
        is_local: whether a rank's gradient is a part of it, to be added up over ranks: that of its own tokens.
    """
    result = nn.Linear(inputs, outputs, bias=False, device=torch.cuda.current_device(), dtype=config.params_dtype)
    if config.perform_initialization:
        config.init_method(result.weight)
    return mark(result, config, is_local)


def norm(config: Any, width: int, is_local: bool) -> nn.RMSNorm:
    """An RMS norm; arguments as of :func:`linear`."""
    placed = dict(device=torch.cuda.current_device(), dtype=config.params_dtype)
    return mark(nn.RMSNorm(width, eps=config.layernorm_epsilon, **placed), config, is_local)


def mark(module: Any, config: Any, is_local: bool) -> Any:
    """The same; its parameters say whether Megatron adds up their gradients over tensor-parallel ranks."""
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel and is_local
    return module


def plain_rms_norm(x: Tensor, epsilon: float) -> Tensor:
    """x / rms(x) over the last dimension, in the type of x."""
    return functional.rms_norm(wide(x), (x.shape[-1],), eps=epsilon).to(x.dtype)
