"""Megatron's ``DotProductAttention`` over a divided sequence, and as its latent attention calls it."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.megatron import alibi, documents, packed_sequences, patches
from mindspeed_fx.megatron.context_parallel import rings, sequence
from mindspeed_fx.megatron.context_parallel.settings import Settings, check_layer, read_settings
from mindspeed_fx.sharding.spmd.ring import RingAttention

ATTENTION = "transformer.dot_product_attention:DotProductAttention"


@dataclass(eq=False)
class Divided:
    """What an attention layer knows of the divided sequence."""

    settings: Settings
    heads_group: Any
    keys_group: Any
    kv_heads: int
    """Heads of keys and values to be exchanged: as many as there are, or copies, so that every rank has a part."""
    window: tuple[int, int] | None
    causal: bool
    scale: float
    keeps: str | None

    @property
    def rank(self) -> int:
        return self.keys_group.rank()


def initialize(
    self: Any,
    config: Any,
    layer_number: int,
    attn_mask_type: Any,
    attention_type: str,
    attention_dropout: float | None = None,
    softmax_scale: float | None = None,
    cp_comm_type: str | None = None,
    pg_collection: Any = None,
    k_channels: int | None = None,
    v_channels: int | None = None,
) -> None:
    """``DotProductAttention.__init__``, also with ``config.context_parallel_size`` above 1 and with heads of other
    widths than ``config.kv_channels``.

    Raises:
        ValueError: flags that do not fit, in one line.
    """
    whole = config
    if config.context_parallel_size > 1:
        whole = copy.copy(config)
        whole.context_parallel_size = 1
    patches.original(f"{ATTENTION}.__init__")(
        self, whole, layer_number, attn_mask_type, attention_type, attention_dropout, softmax_scale, None, pg_collection
    )
    self.config = config
    if k_channels is not None:
        self.hidden_size_per_attention_head = k_channels
    if v_channels is not None:
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
    self.divided = None
    if config.context_parallel_size > 1:
        self.divided = _divide(self, config, pg_collection)


def _divide(attention: Any, config: Any, pg_collection: Any) -> Divided:
    settings = read_settings(config)
    heads, kv_heads = attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition
    check_layer(settings, heads, attention.tp_group.size(), config.softmax_type)
    u = settings.ulysses
    heads_group, keys_group = sequence.subgroups(_context_group(pg_collection), u)
    softmax = attention.scale_mask_softmax
    divided = Divided(
        settings,
        heads_group,
        keys_group,
        kv_heads=math.lcm(kv_heads, u),
        window=softmax.window_size,
        causal=softmax.attn_mask_type.name in ("causal", "padding_causal"),
        scale=attention.softmax_scale * (softmax.scale or 1.0),
        keeps=settings.keeps(attention.layer_number),
    )
    attention.hidden_size_per_partition //= u
    attention.num_attention_heads_per_partition = heads // u
    attention.num_query_groups_per_partition = divided.kv_heads // u
    if settings.ring > 1:  # queries are a part of the sequence: its masks are given
        from megatron.core.transformer.enums import AttnMaskType

        softmax.window_size, softmax.attn_mask_type = None, AttnMaskType.padding
    return divided


def _context_group(pg_collection: Any) -> Any:
    from megatron.core import parallel_state

    group = getattr(pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if group is None else group


def forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    """``DotProductAttention.forward``, with documents' ends in the place of a mask too
    (:mod:`mindspeed_fx.megatron.documents`), and of packed sequences; over a divided sequence with query [rows, batch,
    heads, dim], key and value [rows, batch, kv_heads, ...] of a rank's chunks, and of a mask the rows that
    :func:`batch_on_this_rank` leaves it.

    Returns:
        [rows, batch, heads * v_dim].

    Raises:
        ValueError: packed sequences by ``packed_seq_params``, a bias, rows that are not two chunks, another mask.
    """
    divided = getattr(self, "divided", None)
    if divided is None and packed_seq_params is not None and attention_bias is None:
        return packed_sequences.attend(_core, self, (query, key, value), attn_mask_type, packed_seq_params)
    attention_mask = documents.seen(attention_mask, query.shape[0] * (divided.settings.ranks if divided else 1))
    if divided is None:
        core = patches.original(f"{ATTENTION}.forward")
        return core(self, query, key, value, attention_mask, attn_mask_type, attention_bias, packed_seq_params)
    if packed_seq_params is not None or attention_bias is not None:
        raise ValueError(
            "with --context-parallel-size above 1 the local attention takes no packed_seq_params and no attention_bias;"
            " pack documents with --reset-attention-mask"
        )
    if query.shape[0] % 2:
        raise ValueError(
            f"--seq-length {query.shape[0] * divided.settings.ranks} is not divisible by 2 * --context-parallel-size "
            f"{divided.settings.ranks}"
        )
    query, key, value = _exchange_heads(divided, query, key, value)
    _check_mask(divided, attention_mask, query.shape[0])
    if divided.settings.ring == 1:
        out = _core(self, query, key, value, attention_mask)
    elif divided.settings.gathers_keys:
        mask = _own_mask(divided, attention_mask, query)
        out = _core(self, query, *sequence.gather([key, value], divided.keys_group), mask)
    else:
        out = _ring(self, divided, query, key, value, attention_mask)
    return sequence.from_heads(out, divided.heads_group) if divided.settings.ulysses > 1 else out


def _core(attention: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Megatron's own, which views keys and values as if they were projections."""
    core = patches.original(f"{ATTENTION}.forward")
    return core(attention, query, key.contiguous(), value.contiguous(), mask)


def _exchange_heads(divided: Divided, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """A part of the heads over a longer part of the sequence."""
    ranks, group = divided.settings.ulysses, divided.heads_group
    if ranks == 1:
        return [query, key, value]
    copies = divided.kv_heads // key.shape[2]
    if not divided.settings.gathers_heads:
        if copies > 1:
            key, value = (x.repeat_interleave(copies, 2) for x in (key, value))
        return sequence.to_heads([query, key, value], group)
    own, whole = divided.kv_heads // ranks, sequence.gather([key, value], group)
    if own > 1 and copies > 1:  # a rank's copies may be of one head or of two, and its graph is to be that of all
        whole, copies = [x.repeat_interleave(copies, 2) for x in whole], 1
    whole = [x.narrow(2, group.rank() * own // copies, own) for x in whole]
    return [*sequence.to_heads([query], group), *whole]


def _check_mask(divided: Divided, mask: Tensor | None, rows: int) -> None:
    whole = rows * divided.settings.ring
    if mask is not None and tuple(mask.shape[-2:]) != (rows, whole):
        raise ValueError(
            f"attention_mask {list(mask.shape)} with --context-parallel-algo {divided.settings.algorithm}: valid: "
            f"[batch, 1, {rows}, {whole}], as get_batch_on_this_cp_rank leaves it, or None"
        )


def _own_mask(divided: Divided, mask: Tensor | None, query: Tensor) -> Tensor | None:
    """True where a score of own rows and all keys is masked, as Megatron's masks are; None: all are seen."""
    rows, ranks = query.shape[0], divided.settings.ring
    if divided.window is None and (mask is not None or not divided.causal):
        return mask
    at = sequence.own_positions(rows, ranks, divided.rank, query.device).unsqueeze(1)
    keys = torch.arange(rows * ranks, device=query.device)
    if divided.window is None:
        return keys > at
    # Megatron's window takes the place of a mask.
    return (keys < at - divided.window[0]) | (keys > at + divided.window[1])


def _ring(attention: Any, divided: Divided, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    settings = divided.settings
    causal = divided.causal and divided.window is None and mask is None
    dropout = attention.attention_dropout.p if attention.training else 0.0
    ring = rings.make_ring(divided.keys_group, settings.window, causal, divided.scale, divided.keeps, dropout)
    masked = None if causal else _own_mask(divided, mask, query)
    bias = alibi.key_bias(attention, query.shape[0] * settings.ring, query)
    if masked is not None:
        query, bias = _visible(query, masked[(None,) * (4 - masked.ndim)], bias, attention.softmax_offset)
    if bias is not None:
        bias = sequence.rank_order(bias, 3, settings.ring)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    keep = _draw_kept(attention, q, settings.ring) if dropout else None
    out = RingAttention.apply(q, k, v, attention.softmax_offset, bias, keep, ring)
    return out.permute(2, 0, 1, 3).flatten(2)


def _draw_kept(attention: Any, query: Tensor, ranks: int) -> Tensor:
    """[batch, heads, rows, keys], False where dropout takes a weight of a rank's own rows and all keys: ones as
    Megatron's attention draws, by the tracker of tensor-parallel ranks where the sequence is not theirs."""
    from megatron.core import tensor_parallel

    ones = torch.ones(*query.shape[:3], query.shape[2] * ranks, dtype=query.dtype, device=query.device)
    if attention.config.sequence_parallel:
        return attention.attention_dropout(ones) > 0
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return attention.attention_dropout(ones) > 0


def _visible(query: Tensor, masked: Tensor, bias: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """``query`` and the mask, True where attention is allowed, or with ``bias`` or ``sinks`` what is added to scores. A
    row that sees no key has a zero query and sees all, so that it is the mean of all values, as where Megatron writes
    -10000 into each of its scores; beside a sink it is nothing, as there."""
    blind = masked.all(-1, keepdim=True)  # [batch or 1, 1, rows, 1]
    query = query.masked_fill(blind.permute(2, 0, 1, 3), 0.0)
    if bias is None and sinks is None:
        return query, ~masked | blind
    bias = torch.zeros((), dtype=accumulation_dtype(query.dtype), device=query.device) if bias is None else bias
    return query, torch.where(masked, -math.inf, bias).masked_fill(blind, -10000.0)
