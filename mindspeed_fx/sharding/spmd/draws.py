"""Operators that draw random numbers, on divided values: every rank draws for the whole tensor, as one device draws,
and keeps its part.

DTensor would draw for each part, and ranks of one seed the same numbers. A device draws in the order of memory, so that
what is drawn for a transposed value is laid out as that value is.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from mindspeed_fx.compat.fake import memory_order
from mindspeed_fx.sharding.spmd.parts import sum_partials, whole

FILLS = frozenset("bernoulli_ uniform_ normal_ exponential_ random_ geometric_ cauchy_ log_normal_".split())
"""Operators that overwrite a tensor with random numbers and do not read it."""


def dropout(x: DTensor, p: float, train: bool) -> DTensor:
    """``aten.dropout``."""
    if not train or p == 0:
        return x
    if p == 1:
        return x * 0
    x = sum_partials(x)
    return x * _part(kept(x, p), x)


def kept(x: DTensor, p: float, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Not a DTensor: what dropout of the whole multiplies it with, of the whole shape (or ``shape``)."""
    # Ones, by the same operator: where it is recorded it draws as aten.native_dropout, and bernoulli_ of a transposed
    # value as aten.bernoulli, which draws in the order of dimensions.
    return torch.dropout(_empty(x, shape).fill_(1), p, True)


def draw_in_place(target: torch._ops.OpOverload, name: str, args: tuple, kwargs: dict[str, Any]) -> DTensor:
    """An operator that writes random numbers to its first argument."""
    x, *rest = args
    rest, kwargs = pytree.tree_map_only(DTensor, _local_whole, (rest, kwargs))
    values = _empty(x) if name in FILLS else _local_whole(x).clone()
    return x.copy_(_part(target(values, *rest, **kwargs), x))


def _empty(x: DTensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Not a DTensor: a tensor of the whole shape (or ``shape``), type and order in memory of ``x``."""
    order, shape = memory_order(x), x.shape if shape is None else shape
    stored = torch.empty([shape[d] for d in order], dtype=x.dtype, device=x.device)
    return stored if order == sorted(order) else stored.permute([order.index(d) for d in range(len(order))])


def _part(values: torch.Tensor, like: DTensor) -> DTensor:
    """A tensor that all ranks hold alike, placed as ``like`` is."""
    return whole(values, like).redistribute(placements=like.placements)


def _local_whole(x: DTensor) -> torch.Tensor:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()
