"""A mixture of experts whose experts are divided over ranks: each rank computes the rows of its own, in tensors of
fixed size.

Tokens are gathered, and each rank computes of the rows sorted by expert those that are for its experts; where several
ranks hold the same experts (data parallelism), each takes an equal share of every expert's rows. Its rows come first in
a tensor as long as all of them, and between the grouped products whatever works row by row works on that. What leaves
is zero but for a rank's rows: a sum over ranks, which a plan's next edge scatters. The number of rows is data; nothing
waits for it on the host, and no token is dropped.

Source: Megatron-core's "allgather" token dispatcher; for its "alltoall" one see
    :mod:`mindspeed_fx.sharding.spmd.token_dispatch`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import dtensor
from mindspeed_fx.kernels.base import TAGGED
from mindspeed_fx.sharding.spmd.aten_rules import is_pointwise

aten, ops = torch.ops.aten, torch.ops.mindspeed

BY_DIMENSION = {
    aten.chunk.default: 2,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.slice.Tensor: 1,
    aten.narrow.default: 1,
}
"""Operators that work row by row along any dimension but the first: operator -> position of the dimension."""


def is_rowwise(target: Any) -> bool:
    """Whether each row of the results is made of the same row of the arguments."""
    if target in (operator.getitem, aten.full_like.default) or target in TAGGED["activation"]:
        return True
    return is_pointwise(target) and not target._schema.is_mutable


@dataclass(frozen=True, eq=False)
class Routing:
    """Which rows are this rank's: all of one model's layer have the same."""

    shared: tuple[int, ...]
    """Mesh dimensions over which the rows are divided."""
    take: Tensor
    """[rows]: the row that comes to each place here."""
    taken: Tensor
    """bool [rows]: whether one comes."""
    put: Tensor
    """[rows]: the place that each row has here."""
    mine: Tensor
    """bool [rows]: whether it is here."""
    ends: Tensor
    """[own experts]: where each one's rows end here."""

    def local(self, x: DTensor) -> DTensor:
        """Rows of ``x`` that are this rank's. Called whole over the shared dimensions, where ranks then hold different
        rows.
        """
        placements = [
            Replicate() if i in self.shared or dtensor.is_divided(p, 0) else p for i, p in enumerate(x.placements)
        ]
        x = x.redistribute(placements=placements)
        gradient = [Partial() if i in self.shared else p for i, p in enumerate(placements)]
        return _from_local(
            _Moved.apply(x.to_local(grad_placements=gradient), self.take, self.taken, self.put, self.mine),
            x,
            placements,
            x.shape,
        )

    def back(self, x: DTensor) -> DTensor:
        """The inverse: a sum over the shared dimensions."""
        placements = [Partial() if i in self.shared else p for i, p in enumerate(x.placements)]
        return _from_local(
            _Moved.apply(x.to_local(), self.put, self.mine, self.take, self.taken), x, placements, x.shape
        )


def _from_local(local: Tensor, like: DTensor, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, like.device_mesh, placements, run_check=False, shape=shape, stride=stride)


@dataclass(frozen=True, eq=False)
class OwnRows:
    """A value of which each rank has the rows of its experts."""

    value: DTensor
    routing: Routing


class _Moved(torch.autograd.Function):
    """Rows at ``index`` where ``there``, else zero; the gradient goes the other way, so that nothing is scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, existing: Tensor, back: Tensor, mine: Tensor) -> Tensor:
        ctx.save_for_backward(back, mine)
        return rows_at(x, index, existing)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return rows_at(grad, *ctx.saved_tensors), None, None, None, None


def rows_at(x: Tensor, index: Tensor, existing: Tensor) -> Tensor:
    """Rows of ``x`` at ``index`` where ``existing``, else zero."""
    return torch.where(existing.view(-1, *[1] * (x.ndim - 1)), x.index_select(0, index), 0)


def grouped_matmul(
    x: DTensor | OwnRows, weight: DTensor, offsets: DTensor, zero_tail: bool = True, *, data: Sequence[int]
) -> DTensor | OwnRows:
    """``mindspeed::grouped_matmul``; of experts that are divided, the product of own rows.

    Args:
        x: [rows, k], or own rows.
        weight: [experts, k, n].
        offsets: [experts], where each expert's rows end.
        zero_tail: of the operator; own rows have a tail, the other ranks' rows, which is zero.
        data: mesh dimensions over which ranks that hold the same experts share the rows of each.
    """
    over = [i for i, p in enumerate(weight.placements) if p == Shard(0)]
    if not over and not isinstance(x, OwnRows):
        return ops.grouped_matmul(x, weight, offsets, zero_tail)
    if not isinstance(x, OwnRows):
        divided = [
            i for i, p in enumerate(x.placements) if dtensor.is_divided(p, 0)
        ]  # by a sequence: those ranks share the rows too
        shared = (*over, *(i for i in sorted({*data, *divided}) if i not in over))
        routing = _routing(x.shape[0], weight, offsets, over, shared)
        x = OwnRows(routing.local(x), routing)
    shared = x.routing.shared
    gradient = [Partial() if i in shared and i not in over else p for i, p in enumerate(weight.placements)]
    placements = [Replicate() if i in shared else p for i, p in enumerate(weight.placements)]
    own = weight.to_local(grad_placements=gradient)
    own = _from_local(own, weight, placements, torch.Size((own.shape[0], *weight.shape[1:])))
    ends = DTensor.from_local(
        x.routing.ends.to(offsets.dtype), weight.device_mesh, [Replicate()] * weight.device_mesh.ndim, run_check=False
    )
    return OwnRows(ops.grouped_matmul(x.value, own, ends), x.routing)


def _routing(rows: int, weight: DTensor, offsets: DTensor, over: Sequence[int], shared: Sequence[int]) -> Routing:
    mesh = weight.device_mesh
    ends = offsets.redistribute(placements=[Replicate()] * mesh.ndim).to_local().long()
    own, part, parts = ends.new_zeros(()), ends.new_zeros(()), 1

    def place(dim: int) -> Tensor:
        return dtensor.entry_by_coordinate(mesh, dim, list(range(mesh.size(dim))), ends.device)

    experts = weight.shape[0]
    for dim in shared:
        if dim in over:
            experts //= mesh.size(dim)
            own = own * mesh.size(dim) + place(dim)
        else:
            parts *= mesh.size(dim)
            part = part * mesh.size(dim) + place(dim)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    chosen = own * experts + torch.arange(experts, device=ends.device)
    ends, sizes = ends.index_select(0, chosen), sizes.index_select(0, chosen)
    low, high = (ends - sizes + sizes * p // parts for p in (part, part + 1))
    local_ends = (high - low).cumsum(0)
    first, row = local_ends - (high - low), torch.arange(rows, device=ends.device)
    group = torch.searchsorted(local_ends, row, right=True).clamp(max=experts - 1)
    take, taken = low[group] + row - first[group], row < local_ends[-1]
    group = torch.searchsorted(ends, row, right=True).clamp(max=experts - 1)
    put, mine = first[group] + row - low[group], (row >= low[group]) & (row < high[group])
    return Routing(tuple(shared), take.clamp(0, rows - 1), taken, put.clamp(0, rows - 1), mine, local_ends)


def with_own_rows(run: Callable, target: Any, args: tuple, kwargs: dict) -> Any:
    """``run(target, args, kwargs)`` where some arguments may be own rows: on those rows if the operator works row by
    row, else after they are whole tensors again."""
    matches = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, OwnRows)]
    if not matches:
        return run(target, args, kwargs)
    routing = matches[0].routing
    along = _argument(args, kwargs, BY_DIMENSION[target]) if target in BY_DIMENSION else None
    if all(f.routing is routing for f in matches) and (
        is_rowwise(target) or (along is not None and along % matches[0].value.ndim)
    ):
        rows, width = matches[0].value.shape[0], matches[0].value.ndim
        local = lambda a: (
            a.value
            if isinstance(a, OwnRows)
            else routing.local(a)
            if isinstance(a, DTensor) and a.ndim == width and a.shape[0] == rows
            else a
        )
        results = run(target, *pytree.tree_map(local, (args, kwargs)))
        return pytree.tree_map_only(DTensor, lambda x: OwnRows(x, routing), results)
    return run(target, *pytree.tree_map(whole, (args, kwargs)))


def whole(value: Any) -> Any:
    """Own rows as the sum over ranks that they are; anything else as it is."""
    return value.routing.back(value.value) if isinstance(value, OwnRows) else value


def _argument(args: tuple, kwargs: dict, position: int) -> int:
    return args[position] if position < len(args) else kwargs.get("dim", 0)
