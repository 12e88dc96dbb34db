"""torch's norms under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch


def torch_norm_new(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False, normalization: str = "LayerNorm",
) -> torch.nn.Module:  # fmt: skip
    """``WrappedTorchNorm.__new__`` that also serves sequence parallelism: its parameters carry the attribute by which
    Megatron sums their gradients over the tensor-parallel ranks, as the fused norms' do.

    Raises:
        ValueError: a setting torch's norms do not have.
    """
    from megatron.core.transformer.torch_norm import L2Norm

    for setting in ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"):
        if getattr(config, setting):
            raise ValueError(f"{setting} is not supported by torch's norms")
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm, "L2Norm": L2Norm}
    if config.normalization not in kinds:
        raise ValueError(f"normalization is {config.normalization!r}; valid: {', '.join(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
