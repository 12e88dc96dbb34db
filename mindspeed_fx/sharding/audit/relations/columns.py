"""Columns of rows on their way to experts: pieces of each row, one per rank, split off and joined again.

Example, two ranks of "ep": rows [n, 64] are split into two of [n, 32], which are stacked, [2 n, 32], and sent as a
reduce-scatter. What a rank keeps is the sum of all ranks' rows, one half of each row: every pair's row is there, and
its columns are divided over "ep".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

import torch

from mindspeed_fx.sharding.audit.relations import collectives
from mindspeed_fx.sharding.audit.relations.parts import Digit, Part, Unknown, Unproved, in_front, merged
from mindspeed_fx.sharding.audit.relations.rows import Context, Rows, added, alike


@dataclass(frozen=True, eq=False)
class Stacked:
    """The pieces of ``rows``' columns, one below the other."""

    rows: Rows
    """With whole columns."""
    count: int

    def piece(self, index: Sequence[int]) -> Rows:
        return piece(self.rows, self.count, index)


def piece(x: Rows, count: int, index: Sequence[int]) -> Rows:
    """Piece ``index`` (of each rank) of ``count`` of every row."""
    return replace(x, part=collectives.piece(x.part, 1, count, index))


def joined(pieces: Sequence[Rows], dim: int) -> Rows | Stacked:
    """Pieces of the same rows side by side (``dim`` 1), or one below the other.

    Raises:
        Unknown: they are something else.
        Unproved: of other rows.
    """
    whole = collectives.joined([p.part for p in pieces], 1)
    if whole is None or any(p.experts is not pieces[0].experts for p in pieces):
        raise Unknown("rows are joined that are no pieces of one tensor's columns")
    alike(pieces)
    rows = replace(pieces[0], part=whole)
    return rows if dim == 1 else Stacked(rows, len(pieces))


def scattered(c: Context, x: Stacked, mesh: str) -> Rows:
    """The sum over ranks, of which each keeps one piece of every row."""
    if x.count != len(c.members(0)):
        raise Unknown(f"columns in {x.count} pieces for {len(c.members(0))} ranks")
    if mesh in x.rows.part.meshes():
        raise Unproved(f"reduce_scatter over {mesh} of columns that are divided over it")
    total = added(c, x.rows, False)
    digit, rest = collectives.leading(merged(total.part.dims[1]), x.count)
    part = replace(total.part, dims=(total.part.dims[0], rest))
    return replace(total, part=in_front(part, 1, digit._replace(mesh=mesh)))


def gathered(c: Context, x: Rows, mesh: str) -> Stacked:
    """The columns of all ranks, one below the other."""
    for place in c.places:
        first = x.pairs[c.members(place.rank)[0]]
        if not torch.equal(x.pairs[place.rank], first):
            raise Unproved("columns of different rows are gathered")
    digit, whole = _without(x.part, mesh)
    if collectives.leading(merged(whole.dims[1]), digit.size)[0] != digit:
        raise Unknown(f"columns over {mesh} that are no equal pieces")
    return Stacked(replace(x, part=whole), digit.size)


def _without(part: Part, mesh: str) -> tuple[Digit, Part]:
    """The digit that ``mesh`` shares of the columns, and the same part with it on every rank."""
    digit = next(d for d in part.dims[1] if d.mesh == mesh)._replace(mesh="")
    rest = tuple(d for d in part.dims[1] if d.mesh != mesh)
    whole = in_front(replace(part, dims=(part.dims[0], rest)), 1, digit)
    return digit, replace(whole, dims=(whole.dims[0], merged(whole.dims[1])))
