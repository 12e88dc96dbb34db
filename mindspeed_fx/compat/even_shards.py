"""DTensor's plain shards of a size that is a symbol, alike on every rank."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Shard


def part_even_shards_alike() -> None:
    """What a rank takes of a value whose size is a symbol DTensor (2.13) cuts by ``split``, and says the size of: a
    ceiling for the first ranks, what is left for the last. Graphs of two ranks then have other nodes, and schedules of
    their collectives may differ. From here on a rank takes its part by number where ranks share the size evenly (a
    guard, which every plan asks for anyway), and all have parts of ``size // ranks``; others stay as they are."""
    take, size = getattr(Shard, "_select_split_tensor", None), getattr(Shard, "local_shard_size_and_offset", None)
    if take is None or size is None or getattr(take, "_alike", False):
        return

    def is_even(whole: Any, ranks: int) -> bool:
        return isinstance(whole, torch.SymInt) and hasattr(whole.node, "expr") and bool(whole % ranks == 0)

    @functools.wraps(take)
    def part(self: Any, tensor: Any, num_chunks: int, index: Any, **kwargs: Any) -> Any:
        dim = self.dim
        if not isinstance(index, int) or type(self) is not Shard or not is_even(tensor.shape[dim], num_chunks):
            return take(self, tensor, num_chunks, index, **kwargs)
        own = tensor.unflatten(dim, (num_chunks, tensor.shape[dim] // num_chunks)).select(dim, index)
        if kwargs.get("clone", True):
            return own.clone()
        return own.contiguous() if kwargs.get("contiguous", True) else own

    @functools.wraps(size)
    def own_size(whole: Any, ranks: int, rank: Any, *args: Any) -> Any:
        if args or not isinstance(rank, int) or not is_even(whole, ranks):
            return size(whole, ranks, rank, *args)
        return whole // ranks, whole // ranks * rank

    part._alike = True  # type: ignore[attr-defined]
    Shard._select_split_tensor = part  # type: ignore[method-assign]
    Shard.local_shard_size_and_offset = staticmethod(own_size)  # type: ignore[assignment]
