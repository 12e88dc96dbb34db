"""Ring attention between the ranks of a process group, whose sequences are in Megatron's balanced split already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import Tensor

from mindspeed_fx.sharding.spmd.ring_messages import Ring


@dataclass(frozen=True, eq=False)
class GroupRing(Ring):
    """``mesh`` is the group, ``dim`` of no matter."""

    rank: int = 0
    name: str = ""

    def by_rank(self, value: Callable[[int], int]) -> int:
        return value(self.rank)

    def exchange(self, x: Tensor, messages: Callable[[int, int], int], receives: Callable[[int, int], int]) -> Tensor:
        n = range(self.ranks)
        taken, sent = [receives(self.rank, j) for j in n], [messages(self.rank, j) for j in n]
        return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), taken, sent, self.name)

    def balanced(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)

    def restored(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)


def make_ring(
    group: Any, window: int, causal: bool, scale: float, keeps: str | None, dropout: float = 0.0
) -> GroupRing:
    """A ring through ``group`` in the order of its ranks.

    Args:
        window: ranks of an inner ring; all of them for one ring.
        causal: no mask is given, and queries see the keys up to their own.
        scale: factor on q k^T.
        keeps: what the backward has of other ranks' keys and values from the forward, as in ``Ring``.
        dropout: of the weights; 0 for none.
    """
    return GroupRing(
        mesh=group,
        dim=0,
        ranks=group.size(),
        causal=causal,
        scale=scale,
        softcap=0.0,
        window=window,
        keeps=keeps,
        dropout=dropout,
        rank=group.rank(),
        name=group.group_name,
    )
