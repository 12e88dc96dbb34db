"""What is sent between ranks, and the picking and joining of pieces around it, as moves of digits."""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

from mindspeed_fx.sharding.audit.relations.moves import cut
from mindspeed_fx.sharding.audit.relations.parts import (
    Digit,
    Dim,
    Part,
    Terms,
    Unknown,
    Unproved,
    in_front,
    merged,
    profile,
    settled,
)


def all_reduce(x: Part, mesh: str, kind: str) -> Part:
    if kind != "sum":
        raise Unknown(f"all_reduce of {kind}")
    if mesh not in x.partial:
        raise Unproved(f"all_reduce over {mesh} of what is no partial sum over it")
    return replace(x, partial=x.partial - {mesh})


def all_gather(x: Part, mesh: str) -> Part:
    """The parts of all ranks, stacked in front of the first dimension."""
    if mesh in x.partial:
        raise Unproved(f"all_gather of a partial sum over {mesh}")
    dims, digit = _without(x, mesh, "all_gather")
    return in_front(replace(x, dims=dims), 0, digit._replace(mesh=""))


def reduce_scatter(x: Part, mesh: str, ranks: int, kind: str) -> Part:
    """The sum, of which each rank keeps one piece along the first dimension."""
    if kind != "sum":
        raise Unknown(f"reduce_scatter of {kind}")
    if mesh not in x.partial:
        raise Unproved(f"reduce_scatter over {mesh} of what is no partial sum over it")
    first, rest = leading(x.dims[0], ranks)
    x = replace(x, dims=(rest, *x.dims[1:]), partial=x.partial - {mesh})
    return settled(x, first._replace(mesh=mesh))


def all_to_all(x: Part, mesh: str, ranks: int) -> Part:
    """Piece r along the first dimension goes to rank r; what comes is stacked in its place."""
    if mesh in x.partial:
        raise Unproved(f"all_to_all of a partial sum over {mesh}")
    first, rest = leading(x.dims[0], ranks)
    dims, digit = _without(replace(x, dims=(rest, *x.dims[1:])), mesh, "all_to_all")
    return settled(in_front(replace(x, dims=dims), 0, digit._replace(mesh="")), first._replace(mesh=mesh))


def _without(x: Part, mesh: str, what: str) -> tuple[tuple[Dim, ...], Digit]:
    shared = [d for dim in x.dims for d in dim if d.mesh == mesh]
    if len(shared) != 1:
        raise Unproved(f"{what} over {mesh} of what its ranks hold alike")
    return tuple(tuple(d for d in dim if d.mesh != mesh) for dim in x.dims), shared[0]


def leading(dim: Dim, count: int) -> tuple[Digit, Dim]:
    """The outermost digit of ``count`` values that a rank has, and the others."""
    at = next((i for i, d in enumerate(dim) if not d.mesh), None)
    if at is None or dim[at].size % count:
        raise Unknown(f"{dim[at].size if at is not None else 1} in {count} pieces")
    outer, inner = dim[at].split(dim[at].size // count)
    return outer, (*dim[:at], *((inner,) if inner.size > 1 else ()), *dim[at + 1 :])


def piece(x: Part, dim: int, count: int, index: Sequence[int]) -> Part:
    """Piece ``index`` (of each rank) of ``count`` along a dimension."""
    digit, rest = leading(merged(x.dims[dim]), count)
    return replace(x, dims=(*x.dims[:dim], rest, *x.dims[dim + 1 :]), picked=(*x.picked, (digit, tuple(index), dim)))


def joined(pieces: Sequence[Part], dim: int) -> Part | None:
    """Pieces that are all of one digit, in order, along a dimension; None where they are something else."""
    first = pieces[0]
    if not first.picked or first.picked[-1][0].size != len(pieces):
        return None
    digit = first.picked[-1][0]
    for i, p in enumerate(pieces):
        rest = replace(p, picked=p.picked[:-1])
        if not p.picked or rest != replace(first, picked=first.picked[:-1]):
            return None
        if p.picked[-1][0] != digit or set(p.picked[-1][1]) != {i}:
            return None
    return in_front(replace(first, picked=first.picked[:-1]), dim, digit)


def own(terms: Terms, x: Part, places: dict[str, tuple[int, ...]], ranks: dict[str, int]) -> Part:
    """Pieces that every rank picked by its own place are parts; a piece that all picked alike stays one."""
    for digit, index, dim in reversed(x.picked):
        meshes = [m for m, at in places.items() if at == index and ranks[m] == digit.size]
        whole = in_front(replace(x, picked=x.picked[:-1]), dim, digit)
        if not meshes and len(set(index)) == 1 and not profile(whole.dims[dim]):
            if whole.picked:
                raise Unknown("a piece of a piece")
            size = whole.local[dim] // digit.size
            x = cut(terms, whole, dim, index[0] * size, (index[0] + 1) * size)
            continue
        if not meshes:
            raise Unknown(f"a piece {sorted(set(index))} of {digit.size} that is not picked by a rank's place")
        if meshes[0] in x.partial or meshes[0] in x.meshes():
            raise Unproved(f"a piece by the place in {meshes[0]} of what is divided over it already")
        x = in_front(replace(x, picked=x.picked[:-1]), dim, digit._replace(mesh=meshes[0]))
    return x
