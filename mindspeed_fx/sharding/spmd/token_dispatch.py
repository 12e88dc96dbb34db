"""A mixture of experts with dispatch by all-to-all: each rank sorts its own tokens by expert and sends every copy to
the rank that holds the expert.

Tokens stay divided, as the batch is; experts are divided over the same mesh dimension. A rank counts the copies for
each expert, the counts are exchanged, then the rows; they are put in the order of the receiver's experts, and between
the grouped products whatever works row by row works on them. The results go the same way back. Where experts are
divided over a further dimension over which tokens are whole (tensor parallelism: MindSpeed's TP-extends-EP), a rank
sends the copies for the experts at its own place along it, and what comes back is a sum over that dimension.

What a rank receives is data. Rows come in a tensor of fixed size, and two forms differ in what is sent:

* by counts (no ``capacity``): the rows and nothing else, by one operator whose splits are read when it runs
  (:func:`expert_exchange`); the tensor has room for every copy of all ranks, so that nothing can be dropped
* by ``capacity``: to every rank ``capacity`` times the mean, padded; a plain all-to-all of fixed splits that hides
  behind compute and waits for no count. More copies than that stop the program with an error; none is dropped

Source: Megatron-core's "alltoall" token dispatcher (by counts), and its capacity padding
    (``moe_pad_expert_input_to_capacity``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mindspeed_fx.compat import dtensor
from mindspeed_fx.kernels.base import LIBRARY
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd.expected_collectives import sends_inside
from mindspeed_fx.sharding.spmd.experts import OwnRows, rows_at

aten, ops = torch.ops.aten, torch.ops.mindspeed


# --------------------------------------------------------------------------- one operator for splits that are data


def _fake(rows: Tensor, messages: Tensor, receives: Tensor, size: int, group: str) -> Tensor:
    return rows.new_empty(size, *rows.shape[1:])


def _exchange(rows: Tensor, messages: Tensor, receives: Tensor, size: int, group: str) -> Tensor:
    """Rows to every rank of a group, in order; splits are read on the host when it runs.

    Args:
        rows: [any, ...], at least ``sends.sum()``: those for rank 0 come first, then those for rank 1 ...
        messages, receives: int64 [ranks], how many go to, and come from, each rank.
        size: rows of the result.

    Returns:
        [size, ...]: what came, in the order of the ranks, and zeros behind it.

    Raises:
        RuntimeError: more come than ``size``.
    """
    arg, taken = messages.tolist(), receives.tolist()
    if sum(taken) > size:
        raise RuntimeError(
            f"{sum(taken)} rows come to this rank's experts, and the plan has room for {size}; give the plan's experts "
            "more capacity"
        )
    come = torch.ops._c10d_functional.all_to_all_single(rows[: sum(arg)].contiguous(), taken, arg, group)
    come = torch.ops._c10d_functional.wait_tensor(come)
    return torch.cat([come, come.new_zeros(size - come.shape[0], *come.shape[1:])])


LIBRARY.define(
    "expert_exchange(Tensor rows, Tensor sends, Tensor receives, SymInt size, str group) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("expert_exchange", _exchange, "CompositeExplicitAutograd")
torch.library.register_fake("mindspeed::expert_exchange", _fake, lib=LIBRARY)
expert_exchange = ops.expert_exchange.default


# --------------------------------------------------------------------------- what a graph calls


def permute_tokens(tokens: Any, indices: Any) -> Any:
    """``mindspeed::moe_permute`` of tokens to be sent; on DTensors every rank sorts its own (:class:`Sorted`)."""
    if not isinstance(tokens, DTensor):
        return ops.moe_permute(tokens, indices)
    placements = [p if dtensor.is_divided(p, 0) else Replicate() for p in tokens.placements]
    tokens = tokens.redistribute(placements=placements)
    chosen = indices.redistribute(placements=placements).to_local().reshape(-1)
    result = Sorted(tokens, chosen, indices.numel())
    return result, result


def unpermute_tokens(rows: Any, order: Any, probs: Any, k: int) -> Any:
    """``mindspeed::moe_unpermute`` of what :func:`permute_tokens` sorted: results back to their tokens, and a token's
    added up.
    """
    if not isinstance(order, Sorted):
        return ops.moe_unpermute(rows, order, probs, k)
    if not isinstance(rows, OwnRows):
        raise ShardingError("rows that were sorted by expert come back without having met one")
    masked, local = rows.routing.masked, rows.routing.returned(rows.value.to_local())
    placements = [Partial() if i in masked else p for i, p in enumerate(order.tokens.placements)]
    if probs is not None:
        probs = probs.redistribute(placements=order.tokens.placements).to_local(grad_placements=placements)
    out = ops.moe_unpermute(local, order.rows(masked)[1], probs, k)
    shape = torch.Size((order.pairs // (k if probs is None else probs.shape[1]), out.shape[1]))
    return DTensor.from_local(
        out, order.tokens.device_mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1)
    )


def ends(indices: Any, experts: int, dtype: torch.dtype) -> Any:
    """[experts]: where the rows of each expert end among all; nothing under dispatch by all-to-all, since every
    rank counts its own then.
    """
    if isinstance(indices, DTensor):
        return None
    return count_choices(indices.reshape(-1), experts).cumsum(0).to(dtype)


def count_choices(indices: Tensor, experts: int) -> Tensor:
    """int64 [experts]: how often each is among ``indices``; larger numbers are no expert's."""
    index = indices.long().clamp(max=experts)
    return index.new_zeros(experts + 1).scatter_add(0, index, torch.ones_like(index)).narrow(0, 0, experts)


def uses_all_to_all(x: Any) -> bool:
    """Whether ``x`` is rows on their way to experts, or there."""
    return isinstance(x, Sorted) or (isinstance(x, OwnRows) and isinstance(x.routing, Dispatch))


def grouped_matmul(x: "Sorted | OwnRows", weight: DTensor, capacity: float | None) -> OwnRows:
    """``mindspeed::grouped_matmul`` of rows that are sent to the experts of ``weight`` first, or are there."""
    over = tuple(i for i, p in enumerate(weight.placements) if p == Shard(0) and weight.device_mesh.size(i) > 1)
    if any(p.is_shard() and p != Shard(0) for p in weight.placements):
        raise ShardingError(
            f"experts are divided by number and not inside: {weight.placements}; all-to-all sends tokens to whole "
            "experts"
        )
    factor = x.routing if isinstance(x, OwnRows) else x.to(over, weight.shape[0], capacity)
    value = x.value.to_local() if isinstance(x, OwnRows) else x.arrived(factor)
    product = ops.grouped_matmul(value, factor.own(weight), factor.ends)
    return OwnRows(own_rows(product, weight.device_mesh), factor)


def own_rows(x: Tensor, mesh: Any) -> DTensor:
    """Rows of this rank's own, which no collective may take for a part of anything."""
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


@dataclass(eq=False)
class Sorted:
    """Copies of every rank's own tokens in the order of their experts; also the way back from there."""

    tokens: DTensor
    """[tokens, hidden], divided along them or whole."""
    chosen: Tensor
    """[own tokens * k]: their experts."""
    pairs: int
    """tokens * k, of all ranks."""
    axes: Any = None
    """How the tokens are padded (:class:`padded.Axis`); None: they are not."""
    dispatches: dict[tuple, "Dispatch"] = field(default_factory=dict)
    _rows: dict[tuple, tuple[Tensor, Tensor]] = field(default_factory=dict)
    _arrived: dict["Dispatch", Tensor] = field(default_factory=dict)

    def rows(self, masked: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The copies, and where each pair of token and choice is among them; the gradient is a sum over mesh dimensions
        ``masked``.
        """
        if masked not in self._rows:
            local = self.tokens.to_local(
                grad_placements=[Partial() if i in masked else p for i, p in enumerate(self.tokens.placements)]
            )
            self._rows[masked] = ops.moe_permute(local, self.chosen)
        return self._rows[masked]

    def to(self, over: tuple[int, ...], experts: int, capacity: float | None) -> "Dispatch":
        """The way to experts that are divided over mesh dimensions ``over``.

        Raises:
            ShardingError: tokens are divided over several of them.
        """
        if over not in self.dispatches:
            sent = [i for i in over if dtensor.is_divided(self.tokens.placements[i])]
            if len(sent) > 1:
                names = self.tokens.device_mesh.mesh_dim_names
                raise ShardingError(
                    f"tokens and experts are both divided over {' and '.join(names[i] for i in sent)}; all-to-all "
                    "sends tokens over one mesh dimension: let the plan make them whole over the others"
                )
            self.dispatches[over] = Dispatch.of(self, over, sent[0] if sent else None, experts, capacity)
        return self.dispatches[over]

    def arrived(self, factor: "Dispatch") -> Tensor:
        """The rows of this rank's experts; sent once for all products that read them."""
        if factor not in self._arrived:
            self._arrived[factor] = factor.sent(self.rows(factor.masked)[0])
        return self._arrived[factor]

    def is_sum(self, i: int) -> bool:
        """Whether the gradient of the tokens is a sum over mesh dimension ``i``."""
        return any(i in factor.masked for factor in self.dispatches.values())


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Which row goes where; between three orders: the sender's, that of the message, the receiver's by expert."""

    tokens: DTensor
    dim: int | None
    """Mesh dimension over which rows are sent."""
    masked: tuple[int, ...]
    """Mesh dimensions over which experts are divided, and tokens are whole."""
    ranks: int
    slot: int | None
    """Rows of a padded message to one rank; None: messages are as long as they are."""
    size: int
    """Rows that there is room for."""
    out: tuple[Tensor, Tensor, Tensor, Tensor]
    """Row that comes to each place of the message and whether one does; place of each row and whether it has one."""
    sort: tuple[Tensor, Tensor, Tensor, Tensor]
    """The same from what arrived to the order of experts."""
    messages: Tensor
    receives: Tensor
    """[ranks]: rows to and from each."""
    ends: Tensor
    """[own experts]: where each one's rows end here."""

    def own(self, x: DTensor) -> Tensor:
        """Of ``x`` [experts, ...] what is this rank's experts'; ranks that have other tokens for them have parts of a
        sum of its gradient."""
        over = (*self.masked, self.dim)
        x = x.redistribute(placements=[Shard(0) if i in over else Replicate() for i in range(x.device_mesh.ndim)])
        divided = [i for i, p in enumerate(self.tokens.placements) if dtensor.is_divided(p) and i not in over]
        return x.to_local(grad_placements=[Partial() if i in divided else p for i, p in enumerate(x.placements)])

    @classmethod
    def of(
        cls, chosen: Sorted, over: tuple[int, ...], dim: int | None, experts: int, capacity: float | None
    ) -> "Dispatch":
        mesh, pairs = chosen.tokens.device_mesh, chosen.chosen.shape[0]
        ranks = 1 if dim is None else mesh.size(dim)
        masked, own = tuple(i for i in over if i != dim), experts // math.prod(mesh.size(i) for i in over)
        slot = None if capacity is None or dim is None else min(pairs, math.ceil(capacity * pairs / ranks))
        length, size = (pairs, pairs * ranks) if slot is None else (slot * ranks, slot * ranks)
        counts = count_choices(chosen.chosen, experts)
        starts = counts.cumsum(0) - counts
        device = counts.device

        def here(x: Tensor) -> Tensor:
            """[experts] -> [ranks, own experts]: of those at this rank's place along the masked dimensions."""
            x = x.view(*(mesh.size(i) for i in over), own)
            for at, i in reversed([*enumerate(over)]):
                if i in masked:
                    x = x.index_select(
                        at, dtensor.entry_by_coordinate(mesh, i, list(range(mesh.size(i))), device).view(1)
                    ).squeeze(at)
            return x.reshape(ranks, own)

        sent = here(counts)
        lengths = sent.sum(1)
        base = lengths.cumsum(0) - lengths if slot is None else torch.arange(ranks, device=device) * slot
        out = _gathers(here(starts)[:, 0], lengths, base, pairs, length, ordered=True)
        come = sent if dim is None else dtensor.wait_for(dtensor.all_to_all(sent, [1] * ranks, [1] * ranks, mesh, dim))
        receives = come.sum(1)
        arrived = receives.cumsum(0) - receives if slot is None else torch.arange(ranks, device=device) * slot
        starts = (arrived.unsqueeze(1) + come.cumsum(1) - come).t().reshape(-1)
        by_expert = come.t().reshape(-1)
        sort = _gathers(starts, by_expert, by_expert.cumsum(0) - by_expert, size, size, ordered=False)
        if slot is not None:
            aten._assert_async.msg(
                (lengths <= slot).all(),
                f"more rows go to one rank's experts than the {slot} that the plan's capacity of {capacity} has room "
                "for",
            )
        return cls(
            chosen.tokens, dim, masked, ranks, slot, size, out, sort, lengths, receives, come.sum(0).cumsum(0)
        )._announced(length, sent)

    def _announced(self, length: int, counts: Tensor) -> "Dispatch":
        if self.dim is not None:
            sends_inside(
                "all_to_all", self.dim, self.ranks * (counts.shape[1]) * 8, False, "numbers of tokens for experts"
            )
        return self

    def sent(self, rows: Tensor) -> Tensor:
        """Own rows [pairs, ...] -> [size, ...], those for this rank's experts in their order, and zeros."""
        self._says(rows)
        return _Moved.apply(rows, self, False, *self.out, *self.sort, self.messages, self.receives)

    def returned(self, rows: Tensor) -> Tensor:
        """The inverse; zero where a pair's expert is at another place along the masked dimensions."""
        self._says(rows)
        return _Moved.apply(rows, self, True, *self.out, *self.sort, self.messages, self.receives)

    def _says(self, rows: Tensor) -> None:
        if self.dim is not None:
            width = math.prod(rows.shape[1:]) * rows.dtype.itemsize
            for backward in (False, True):
                sends_inside(
                    "all_to_all", self.dim, self.size * width + 16 * self.ranks, backward, "tokens to experts and back"
                )

    def exchanged(self, rows: Tensor, messages: Tensor, receives: Tensor, size: int) -> Tensor:
        """The message itself."""
        if self.dim is None:
            return rows if rows.shape[0] == size else rows.narrow(0, 0, size)
        if self.slot is not None:
            return dtensor.wait_for(
                dtensor.all_to_all(
                    rows, [self.slot] * self.ranks, [self.slot] * self.ranks, self.tokens.device_mesh, self.dim
                )
            )
        return dtensor.all_to_all_by_counts(rows, messages, receives, size, self.tokens.device_mesh, self.dim)

    def local(self, x: DTensor) -> DTensor:
        raise ShardingError(
            f"a value of {tuple(x.shape)} meets rows that were sent to their experts, and was not sent with them; plan "
            '"ep" gathers tokens instead'
        )

    def back(self, x: DTensor) -> DTensor:
        raise ShardingError(
            'rows that were sent to their experts are read by an operator that does not work row by row; plan "ep" '
            "gathers tokens instead"
        )


def _gathers(
    starts: Tensor, lengths: Tensor, bases: Tensor, rows: int, places: int, ordered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Runs of rows to other places, as gathers both ways: ``lengths[g]`` rows from ``starts[g]`` on are at
    ``bases[g]``.

    Args:
        starts, lengths, bases: [runs]; bases ascending.
        ordered: starts are so too.

    Returns:
        row of each place [places] and whether it has one; place of each row [rows] and whether it has one.
    """

    def result(first: Tensor, other: Tensor, count: int, ordered: bool) -> tuple[Tensor, Tensor]:
        length = lengths
        if not ordered:
            order = torch.argsort(
                2 * first + (length > 0)
            )  # of runs from one row on, those without rows first: ends ascend too
            first, other, length = (x.index_select(0, order) for x in (first, other, length))
        at = torch.arange(count, device=first.device)
        run = torch.searchsorted(first + length, at, right=True).clamp(max=first.shape[0] - 1)
        existing = at - first[run]
        return other[run] + existing, (existing >= 0) & (existing < length[run])

    row, has = result(bases, starts, places, True)
    place, goes = result(starts, bases, rows, ordered)
    return row.clamp(0, rows - 1), has, place.clamp(0, places - 1), goes


class _Moved(torch.autograd.Function):
    """Rows there, or back; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Dispatch, back: bool, *tables: Tensor) -> Tensor:
        ctx.by, ctx.back = factor, back
        ctx.save_for_backward(*tables)
        return _move_rows(x, factor, back, tables)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _move_rows(grad.contiguous(), ctx.by, not ctx.back, ctx.saved_tensors), None, None, *[None] * 10


def _move_rows(x: Tensor, factor: Dispatch, back: bool, tables: Any) -> Tensor:
    row, has, place, goes, first, came, later, stays, messages, receives = tables
    length = row.shape[0]
    if not back:
        return rows_at(factor.exchanged(rows_at(x, row, has), messages, receives, factor.size), first, came)
    return rows_at(factor.exchanged(rows_at(x, later, stays), receives, messages, length), place, goes)
