"""Chunks of a divided sequence: Megatron's balanced split, and how parts of several ranks become whole again."""

from __future__ import annotations

import math
import weakref
from typing import Any, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_fx.megatron import collectives
from mindspeed_fx.megatron.groups import ALONE


def own_chunks(x: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """Chunks ``rank`` and 2 ranks - 1 - ``rank`` of the 2 ``ranks`` along ``dim``, one behind the other."""
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def _unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """``x.unflatten(dim, sizes)``, which Dynamo cannot capture while dropout draws from Megatron's tracker."""
    dim %= x.dim()
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def in_order(parts: Tensor) -> Tensor:
    """Parts [ranks, rows, ...] with two chunks each, as :func:`own_chunks` takes them, become [ranks * rows, ...]."""
    chunks = _unflatten(parts, 1, (2, -1))
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


def in_parts(x: Tensor, ranks: int) -> Tensor:
    """The inverse of :func:`in_order`."""
    low, high = _unflatten(x, 0, (2 * ranks, -1)).chunk(2)
    return torch.stack([low, high.flip(0)], 1).flatten(1, 2)


def rank_order(x: Tensor, dim: int, ranks: int) -> Tensor:
    """The whole sequence along ``dim`` in the order of the ranks that hold it: :func:`own_chunks` of each."""
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)], dim)


def own_positions(rows: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """[rows]: where in the sequence the ``rows`` elements of a rank are."""
    half = rows // 2
    inside = torch.arange(half, device=device)
    return torch.cat([inside + rank * half, inside + (2 * ranks - 1 - rank) * half])


def to_heads(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Parts of the sequence for parts of the heads, all in one message.

    Args:
        tensors: each [rows, batch, heads, dim], as :func:`own_chunks` of the ranks of ``group``; heads divide by them.

    Returns:
        each [ranks * rows, batch, heads / ranks, dim], in order; the heads that are a rank's in order.
    """
    ranks = group.size()
    parts = [_unflatten(x, 2, (ranks, -1)).movedim(2, 0).flatten(3) for x in tensors]
    got = in_order(_exchange(torch.cat(parts, -1), group))
    return [
        _unflatten(part, -1, (-1, x.shape[-1])) for part, x in zip(got.split([p.shape[-1] for p in parts], -1), tensors)
    ]


def from_heads(x: Tensor, group: Any) -> Tensor:
    """[ranks * rows, batch, width] of a rank's heads become [rows, batch, ranks * width] of all."""
    ranks = group.size()
    return _exchange(in_parts(x, ranks), group).movedim(0, 2).flatten(2)


def _exchange(x: Tensor, group: Any) -> Tensor:
    """x [ranks, ...]: entry i goes to rank i; what comes is in the order of the ranks."""
    return collectives.all_to_all(group, x.flatten(0, 1)).view(x.shape)


def gather(tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
    """Each [rows, batch, heads, dim] of every rank, in order, in one message: [ranks * rows, batch, heads, dim]. The
    gradient is the sum over ranks of what each has of its part.
    """
    flat = torch.cat([x.flatten(2) for x in tensors], -1)
    whole = collectives.gather_from_sequence_parallel_region(flat, group=group)
    parts = in_order(_unflatten(whole, 0, (group.size(), -1))).split([math.prod(x.shape[2:]) for x in tensors], -1)
    return [_unflatten(part, -1, x.shape[2:]) for part, x in zip(parts, tensors)]


_subgroups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Group -> ranks -> part of it; gone with the group."""


def subgroups(group: Any, ulysses: int) -> tuple[Any, Any]:
    """(ranks that exchange heads, ranks that exchange keys) of this rank in ``group``: neighbours, and those at the
    same place among theirs. Called by all ranks of ``group``.
    """
    size, place = group.size(), group.rank()
    first = place - place % ulysses
    return (
        _subgroup(group, range(first, first + ulysses)),
        _subgroup(group, range(place % ulysses, size, ulysses)),
    )


def _subgroup(group: Any, places: Sequence[int]) -> Any:
    if len(places) == group.size():
        return group
    if len(places) == 1:
        return ALONE
    everyone = dist.get_process_group_ranks(group)
    ranks = tuple(everyone[i] for i in places)
    parts = _subgroups.setdefault(group, {})
    if ranks not in parts:
        parts[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return parts[ranks]
