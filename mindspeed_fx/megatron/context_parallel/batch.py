"""A rank's part of the batch and of rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.context_parallel.sequence import own_chunks
from mindspeed_fx.megatron.context_parallel.settings import read_settings

SPLIT = "utils:get_batch_on_this_cp_rank"
POSITIONS = "models.common.embeddings.rope_utils:get_pos_emb_on_this_cp_rank"


def batch_on_this_rank(batch: dict[str, Any], cp_group: Any = None) -> dict[str, Any]:
    """``get_batch_on_this_cp_rank``; of a mask the rows that this rank computes: those of all ranks that it exchanges
    heads with."""
    original = patches.original(SPLIT)
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
    mask = batch.get("attention_mask")
    if mask is None or group.size() == 1:
        return original(batch, cp_group)
    settings = read_settings(_Size(group.size()))
    rest = original({**batch, "attention_mask": None}, cp_group)
    rank = group.rank() // settings.ulysses
    own = mask if settings.ring == 1 else own_chunks(mask, 2, settings.ring, rank)  # all rows, or documents' ends
    return {**rest, "attention_mask": own}


@dataclass(frozen=True)
class _Size:
    context_parallel_size: int


def positions_on_this_rank(pos_emb: Tensor, seq_dim: int, cp_group: Any) -> Tensor:
    """``get_pos_emb_on_this_cp_rank`` without an index on CUDA."""
    if cp_group is None:
        raise ValueError("cp_group must be provided to get positional embedding per CP rank")
    return own_chunks(pos_emb, seq_dim, cp_group.size(), cp_group.rank())
