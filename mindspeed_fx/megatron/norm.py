"""torch's norms under sequence parallelism, and with weights that are offsets from one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional, init


class OffsetRMSNorm(torch.nn.RMSNorm):
    """x / rms(x) * (1 + weight) (Gemma; Megatron's --apply-layernorm-1p).

    Attributes:
        start: what the weights are at first.
        is_wide: whether the sum with one is float32 too, and not in the type of the weights.
    """

    start = 0.0
    is_wide = False

    def reset_parameters(self) -> None:
        init.constant_(self.weight, self.start)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_wide:
            kind = torch.promote_types(x.dtype, torch.float32)
            wide = functional.rms_norm(x.to(kind), self.normalized_shape, 1 + self.weight.to(kind), self.eps)
            return wide.to(x.dtype)
        return functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class OffsetLayerNorm(torch.nn.LayerNorm):
    """torch's layer norm times (1 + weight), the weight from zero (Megatron's --apply-layernorm-1p)."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class AllHeadsRMSNorm(torch.nn.RMSNorm):
    """One norm over all heads of queries or keys [..., heads, width] (MiniMax)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2)).view(x.shape)


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

    for setting in ("persist_layer_norm", "memory_efficient_layer_norm"):
        if getattr(config, setting):
            raise ValueError(f"{setting} is not supported by torch's norms")
    kinds: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm, "L2Norm": L2Norm}
    if config.layernorm_zero_centered_gamma:
        kinds.update(LayerNorm=OffsetLayerNorm, RMSNorm=OffsetRMSNorm)
    if config.normalization not in kinds:
        raise ValueError(f"normalization is {config.normalization!r}; valid: {', '.join(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm
