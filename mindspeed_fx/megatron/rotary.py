"""Rotary embedding and attention masks without ``lru_cache`` in a graph, and on the device of a machine without
CUDA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

YARN = "models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding"
ROTARY = "models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"


def without_cache(cached: Any) -> Any:
    """The method that an ``lru_cache`` wraps."""
    while hasattr(cached, "__wrapped__"):
        cached = cached.__wrapped__
    return cached


def get_emb(self: Any, max_seq_len: int, offset: int = 0) -> Tensor:
    """``RotaryEmbedding.get_emb`` with ``inv_freq`` left where the model is: angles [seq, 1, 1, dim]."""
    freqs = self.get_freqs_non_repeated(max_seq_len, offset)
    angles = freqs.repeat_interleave(2, dim=-1) if self.rotary_interleaved else torch.cat((freqs, freqs), dim=-1)
    return angles[:, None, None, :]


def yarn_get_emb(device: str) -> Any:
    """``YarnRotaryEmbedding.get_emb`` on ``device``: angles [seq, 1, 1, dim], and the factor of their cosines and
    sines.
    """
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn

    concentration = without_cache(yarn._yarn_get_concentration_factor)

    def get_emb(self: Any, max_seq_len: int, offset: int = 0) -> tuple[Tensor, float]:
        if self.rotary_interleaved:
            raise ValueError("rotary_interleaved=True: YaRN's rotation turns halves of a head; valid: False")
        extra, inter = self.inv_freq_extra.to(device), self.inv_freq_inter.to(device)
        low, high = yarn._yarn_find_correction_range(
            self.beta_fast,
            self.beta_slow,
            self.dim,
            self.rotary_base,
            self.original_max_position_embeddings,
            self.correction_range_round_to_int,
        )
        kept = 1.0 - yarn._yarn_linear_ramp_mask(low, high, self.dim // 2, device=extra.device).to(torch.float32)
        freqs = torch.outer(
            torch.arange(max_seq_len, device=extra.device, dtype=extra.dtype) + offset,
            inter * (1 - kept) + extra * kept,
        )
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :], concentration(
            self.scaling_factor, self.mscale, self.mscale_all_dim
        )

    return get_emb


def causal_mask(sq: int, *, device: str = "cpu") -> Tensor:
    """``get_default_causal_mask``: boolean [sq, sq], True above the diagonal: masked. Made of constants, in the
    graph.
    """
    return torch.ones(sq, sq, dtype=torch.bool, device=device).triu(1)


def sliding_window_causal_mask(sq: int, skv: int, window_size: tuple[int, int], *, device: str = "cpu") -> Tensor:
    """``get_sliding_window_causal_mask``: boolean [sq, skv], True outside the window around the diagonal that ends at
    the last key.
    """
    inside = torch.ones(sq, skv, dtype=torch.bool, device=device)
    return ~inside.triu(skv - sq - window_size[0]).tril(skv - sq + window_size[1])
