"""Weights of tensor parallelism in two dimensions as parts of whole ones, for checkpoints of the form ``torch_dist``.

A whole weight is that of tensor parallelism in one dimension, so that a run of either form, on any number of ranks,
reads what the other has written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Place = tuple[int, int, int]
"""A dimension of the whole weight, the number of this rank's part along it, and how many there are."""


def sharded(
    weight: Tensor, key: str, places: tuple[Place, ...], prepended: tuple[Place, ...], metadata: Any, copy: int = 0
) -> dict[str, Any]:
    """{key: Megatron's ShardedTensor} of a part.

    Args:
        prepended: Megatron's offsets of the layer.
        metadata: of the checkpoint, Megatron's.
        copy: which one of the ranks that hold the same part this is; others than the first do not save it.
    """
    return {key: _tensor(key, weight, places, prepended, (0, copy, _data_rank(metadata)))}


def sharded_halves(
    weight: Tensor, key: str, places: tuple[Place, ...], prepended: tuple[Place, ...], metadata: Any
) -> dict[str, Any]:
    """As :func:`sharded`, of a gated layer: rows [2 n, ...] are n of the whole's first half and n of its second."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    (rows, part, parts), *others = places
    apart = bool((metadata or {}).get("singleton_local_shards"))

    @torch.no_grad()
    def halves(name: str, data: Tensor, replica_id: Any, flattened_range: Any) -> list[Any]:
        tensors = []
        for half, values in enumerate(data.chunk(2)):
            place = (rows, part, parts) if apart else (rows, part + half * parts, 2 * parts)
            own = f"{name}_{'wv'[half]}" if apart else name
            tensors.append(_tensor(own, values, (place, *others), prepended, replica_id))
        return tensors

    replica = (0, 0, _data_rank(metadata))
    return {key: ShardedTensorFactory(key, weight, halves, torch.cat, replica)}


def empty(key: str, prepended: tuple[Place, ...]) -> dict[str, Any]:
    """{key: Megatron's ShardedObject} of nothing."""
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

    return {key: make_sharded_object_for_checkpoint(None, key, prepended)}


def _tensor(key: str, part: Tensor, places: tuple[Place, ...], prepended: tuple[Place, ...], replica: Any) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    first = len(prepended)
    offsets = [(first + dim, number, count) for dim, number, count in places]
    return ShardedTensor.from_rank_offsets(key, part, *prepended, *offsets, replica_id=replica, prepend_axis_num=first)


def _data_rank(metadata: Any) -> int:
    from megatron.core import parallel_state

    group = (metadata or {}).get("dp_cp_group")
    return (group or parallel_state.get_data_parallel_group(with_context_parallel=True)).rank()
