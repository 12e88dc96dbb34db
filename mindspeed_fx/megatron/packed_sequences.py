"""Sequences packed into one row (``packed_seq_params``, layout thd; ``--sft``), which Megatron leaves to
TransformerEngine's attention.

Where they end are numbers of the batch: everything is computed of tensors, so that a chunk is one graph, however long
the sequences are, and attention skips what a sequence does not see (:mod:`mindspeed_fx.megatron.documents`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron import documents, patches

ROTATE = "models.common.embeddings.rope_utils:_apply_rotary_pos_emb_thd"
ROLL = "transformer.multi_token_prediction:_roll_tensor_packed_seq"
CAUSAL = ("causal", "padding_causal")


def attend(core: Any, attention: Any, qkv: tuple[Tensor, ...], mask_type: Any, parameters: Any) -> Tensor:
    """``DotProductAttention.forward`` of packed sequences.

    Args:
        core: the forward of one sequence: (attention, query, key, value, mask).
        attention: the ``DotProductAttention``.
        qkv: [tokens, heads, dim], [tokens, kv_heads, dim] and [tokens, kv_heads, v_dim].
        mask_type: ``AttnMaskType`` of the call; None: the layer's.
        parameters: ``PackedSeqParams``, of self-attention: queries and keys end at the same places. Sequences that are
            padded are taken with their padding, which a causal query does not see.

    Returns:
        [tokens, heads * v_dim].

    Raises:
        ValueError: another layout; cross-attention; padded sequences without a causal mask; a window.
    """
    softmax = attention.scale_mask_softmax
    is_causal = (mask_type or softmax.attn_mask_type).name in CAUSAL
    if parameters.qkv_format != "thd":
        raise ValueError(f"qkv_format {parameters.qkv_format!r} of packed_seq_params in local attention; valid: 'thd'")
    if attention.attention_type != "self":
        raise ValueError(f"packed_seq_params with {attention.attention_type} attention; valid: self")
    if parameters.cu_seqlens_q_padded is not None and not is_causal:
        raise ValueError("packed_seq_params.cu_seqlens_q_padded without a causal mask; valid: None")
    if softmax.window_size is not None:
        raise ValueError(f"window_size {softmax.window_size} with packed_seq_params in local attention; valid: None")
    query, key, value = (x.unsqueeze(1) for x in qkv)
    mask = documents.mask_of(_limits(parameters)[None, 1:], query.shape[0], is_causal)
    return core(attention, query, key, value, mask).squeeze(1)


def _limits(parameters: Any) -> Tensor:
    """[sequences + 1] int64: 0, and where each sequence ends."""
    padded = parameters.cu_seqlens_q_padded
    return (parameters.cu_seqlens_q if padded is None else padded).flatten().long()


def rotate(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """``_apply_rotary_pos_emb_thd`` without lengths on the host.

    Args:
        t: [tokens, heads, dim].
        cu_seqlens: [sequences + 1] or [1, sequences + 1]: 0, and where each ends.
        freqs: angles [any, 1, 1, dim] of a sequence's places, or [tokens, ...] of each token.
        rotary_interleaved: pairs lie side by side; else they are halves.
        multi_latent_attention: as Megatron's.
        mscale: factor of cosines and sines.
        cp_group: of context parallelism.
    """
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    if cp_group is not None and cp_group.size() > 1:
        return patches.original(ROTATE)(
            t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group
        )
    if freqs.shape[0] != t.shape[0]:
        freqs = freqs[places_within(cu_seqlens.flatten().long(), t.shape[0])]
    return _apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), freqs, rotary_interleaved, multi_latent_attention, mscale
    ).squeeze(1)


def places_within(limits: Tensor, tokens: int) -> Tensor:
    """The place of each token in its sequence, [tokens], of ``limits`` [sequences + 1], 0 first."""
    return torch.arange(tokens, device=limits.device) - limits[documents.numbers_of(limits[None, 1:], tokens)[0]]


def roll(tensor: Tensor, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None) -> tuple[Tensor, Tensor]:
    """``_roll_tensor_packed_seq`` without lengths on the host: each element's successor in its sequence, zero behind
    the last, along the last of ``dims``, and the sum."""
    if shifts != -1 or dims not in (-1, tensor.dim() - 1) or (cp_group is not None and cp_group.size() > 1):
        return patches.original(ROLL)(tensor, shifts, dims, packed_seq_params, cp_group)
    ends = packed_seq_params.cu_seqlens_q.flatten().long()[None, 1:]
    places = torch.arange(tensor.shape[-1], device=tensor.device)
    numbers = documents.numbers_of(ends, tensor.shape[-1])[0]
    is_last = numbers != documents.numbers_of(ends, tensor.shape[-1] + 1)[0, 1:]
    rolled = tensor.roll(-1, -1).masked_fill(is_last, 0)
    rolled = torch.where(places < ends[0, -1], rolled, tensor)
    return rolled, rolled.sum()


def table() -> list[patches.Patch]:
    """What is replaced in Megatron-core."""
    reason = "asks the host for the lengths of packed sequences"
    return [
        patches.Patch(ROTATE, rotate, reason, patches.EVERYWHERE),
        patches.Patch(
            ROLL, roll, f"{reason}, and rolls none where they come as one row of a batch", patches.EVERYWHERE
        ),
    ]
