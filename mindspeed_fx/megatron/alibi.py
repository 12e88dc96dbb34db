"""ALiBi in Megatron's local attention: scores s_ij + m_h (j - i), with a slope m_h for every head.

Source: Press et al. 2022, "Train Short, Test Long"; MindSpeed's ``--position-embedding-type alibi``. It takes causal
attention, where MindSpeed's forms of the bias (square or not, filled with -inf, either sign above the diagonal) are
one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mindspeed_fx.megatron.context_parallel import sequence


def slopes(heads: int) -> list[float]:
    """2^(-8 h / n) for h = 1 ... n, n the largest power of two up to ``heads``; for more heads every other slope of
    twice as many."""
    n = 1 << (heads.bit_length() - 1)
    powers = [2.0 ** (-8.0 * h / n) for h in range(1, n + 1)]
    return powers + [2.0 ** (-4.0 * h / n) for h in range(1, 2 * (heads - n), 2)]


def add_bias(attention: nn.Module) -> None:
    """Give a ``DotProductAttention`` the slopes of its heads, and its scores their bias.

    Raises:
        ValueError: attention that is not causal.
    """
    softmax, divided = attention.scale_mask_softmax, getattr(attention, "divided", None)
    causal = divided.causal if divided is not None else softmax.attn_mask_type.name in ("causal", "padding_causal")
    if not causal:
        raise ValueError("--position-embedding-type alibi: attention that is not causal; valid: causal attention, rope")
    heads, place = attention.num_attention_heads_per_partition, attention.tp_group.rank()
    if divided is not None:
        place = place * divided.settings.ulysses + divided.heads_group.rank() if divided.settings.ulysses > 1 else place
    own = slopes(attention.config.num_attention_heads)[place * heads : (place + 1) * heads]
    # Plain numbers and no buffer: Float16Module would round them, and positions times them, to 16 bits.
    attention.alibi_slopes = own

    def with_bias(module: nn.Module, inputs: tuple) -> tuple:
        scores, *others = inputs
        bias = _slopes_of(attention, scores) * _distances(attention, scores)
        biased = scores + (bias if module.scale is None else bias / module.scale)
        return (biased if module.softmax_in_fp32 else biased.to(scores.dtype), *others)

    softmax.register_forward_pre_hook(with_bias)


def _distances(attention: nn.Module, scores: Tensor) -> Tensor:
    """j - i of every score, [rows, keys]."""
    rows, keys = scores.shape[-2:]
    at, divided = torch.arange(rows, device=scores.device), getattr(attention, "divided", None)
    if divided is not None and divided.settings.gathers_keys and divided.settings.ring > 1:
        at = sequence.own_positions(rows, divided.settings.ring, divided.rank, scores.device)
    return torch.arange(keys, device=scores.device) - at.unsqueeze(1)


def _slopes_of(attention: nn.Module, like: Tensor) -> Tensor:
    """[1, heads, 1, 1] in float32, or in float64 where ``like`` is."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.tensor(attention.alibi_slopes, dtype=wide, device=like.device).view(1, -1, 1, 1)


def key_bias(attention: nn.Module, keys: int, query: Tensor) -> Tensor | None:
    """m_h (j - last) for every key, [1, heads, 1, keys]: a softmax does not change when a row is moved as a whole, so
    that no bias for every pair is needed. None without ALiBi."""
    if not hasattr(attention, "alibi_slopes"):
        return None
    return _slopes_of(attention, query) * (torch.arange(keys, device=query.device) - (keys - 1))
