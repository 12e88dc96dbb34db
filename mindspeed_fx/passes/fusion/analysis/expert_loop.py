"""What a loop over experts does: which rows a mask chooses for an expert, and where its results are added.

A mask is read as "choice number e": ``choices == e``, or a part of ``one_hot(choices)``, in any order of dimensions, or
whether any of a token's choices is e. The places where it holds (``chosen_rows``) are pairs of token and choice, and an
index of them is a coordinate of a pair. Each expert adds its rows to one value, or writes them, in one node; those of
all experts are a chain. Nothing is edited here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from mindspeed_fx.capture.chosen_rows import BOUNDED
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Miss

SAME = (aten.to.dtype, aten.contiguous.default, aten.clone.default, aten.detach.default)
EXPERTS = -1
"""The dimension of a one-hot vector, among the numbers of the choices' dimensions."""


@dataclass(frozen=True)
class Mask:
    """Where ``choices`` is ``expert``; dimensions of the mask are those of the choices, in another order, or some."""

    choices: fx.Node
    """Integers, [tokens, k] or of any other shape."""
    dims: tuple[int, ...]
    """Of each dimension of the mask, its number among those of the choices; :data:`EXPERTS` of a one-hot vector."""
    expert: int | None = None

    @property
    def joins(self) -> bool:
        """Whether it says "any of these choices"."""
        return len(self.dims) < match.value(self.choices).dim()


def read_mask(n: Any) -> Mask | None:
    """``n`` as a mask, or as one-hot vectors of choices; None for other values."""
    if not isinstance(n, fx.Node) or n.meta.get("mutated"):
        return None
    if match.is_call(n, aten.one_hot.default):
        return Mask(n.args[0], (*range(match.value(n.args[0]).dim()), EXPERTS))
    if match.is_call(n, aten.ne.Scalar, aten.gt.Scalar) and n.args[1] == 0 or match.is_call(n, *SAME):
        return read_mask(n.args[0])
    if match.is_call(n, aten.eq.Scalar, aten.eq.Tensor):
        inner, number = read_mask(n.args[0]), match.number(n.args[1])
        if inner is not None and number == 1:
            return inner
        if type(number) is int and not match.is_float(n.args[0]):
            return Mask(n.args[0], tuple(range(match.value(n.args[0]).dim())), number)
        return None
    if match.is_call(n, match.operator.getitem) and match.is_call(n.args[0], aten.unbind.int):
        return _selected(n.args[0].args[0], match.argument(n.args[0], "dim", 0), n.args[1])
    if match.is_call(n, aten.select.int):
        return _selected(*n.args)
    inner = read_mask(n.args[0]) if n.op == "call_function" and n.args else None
    if inner is None:
        return None
    return _rearranged(n, inner)


def _selected(x: Any, dim: int, number: Any) -> Mask | None:
    inner = read_mask(x)
    if inner is None or inner.expert is not None or inner.dims[dim] != EXPERTS or type(number) is not int:
        return None
    rest = [d for i, d in enumerate(inner.dims) if i != dim % len(inner.dims)]
    return Mask(inner.choices, tuple(rest), number)


def _rearranged(n: fx.Node, inner: Mask) -> Mask | None:
    rank = len(inner.dims)
    if match.is_call(n, aten.permute.default):
        return Mask(inner.choices, tuple(inner.dims[d] for d in n.args[1]), inner.expert)
    if match.is_call(n, aten.transpose.int, aten.t.default):
        a, b = (d % rank for d in (n.args[1:] if n.target is aten.transpose.int else (0, 1)))
        order = [b if d == a else a if d == b else d for d in range(rank)]
        return Mask(inner.choices, tuple(inner.dims[d] for d in order), inner.expert)
    if match.is_call(n, aten.any.dim, aten.sum.dim_IntList) and not match.argument(n, "keepdim", False):
        dims = n.args[1] if isinstance(n.args[1], (list, tuple)) else [n.args[1]]
        if any(inner.dims[d] == EXPERTS for d in dims):
            return None
        kept = tuple(d for i, d in enumerate(inner.dims) if i not in [d % rank for d in dims])
        return Mask(inner.choices, kept, inner.expert)
    return None


@dataclass(frozen=True)
class Coordinate:
    """An index of the pairs that a mask chooses: their place along a dimension of the choices, divided by a number."""

    mask: Mask
    dim: int
    divisor: int = 1


def read_coordinate(n: Any) -> Coordinate | None:
    """``n`` [chosen] as a coordinate of what a mask chose; None for other values."""
    while match.is_call(n, aten.to.dtype):
        n = n.args[0]
    if match.is_call(n, match.operator.getitem) and match.is_call(n.args[0], aten.unbind.int):
        places, number = n.args[0].args[0], n.args[1]
        return _coordinate(places, number) if match.argument(n.args[0], "dim", 0) in (1, -1) else None
    if match.is_call(n, aten.select.int) and n.args[1] in (1, -1):
        return _coordinate(n.args[0], n.args[2])
    if match.is_call(n, aten.squeeze.default, aten.squeeze.dim, *match.RESHAPES) and match.value(n).dim() == 1:
        return _coordinate(n.args[0], 0) if match.value(n.args[0]).shape[-1] == 1 else None
    if match.is_call(n, aten.floor_divide.default, aten.div.Tensor_mode) and type(n.args[1]) is int:
        inner = read_coordinate(n.args[0])
        floors = n.target is aten.floor_divide.default or n.kwargs.get("rounding_mode") == "floor"
        return Coordinate(inner.mask, inner.dim, inner.divisor * n.args[1]) if inner and floors else None
    return None


def _coordinate(places: Any, number: int) -> Coordinate | None:
    if not match.is_call(places, BOUNDED):
        return None
    mask = read_mask(places.args[0])
    if mask is None or mask.expert is None:
        return None
    return Coordinate(mask, mask.dims[number])


def taken(n: Any) -> tuple[fx.Node, list[Coordinate]] | None:
    """(x, coordinates) when ``n`` is the elements of x at coordinates of chosen pairs, one for each of the first
    dimensions of x; views that add dimensions of one are left out."""
    while match.is_call(n, *match.RESHAPES, *SAME, aten.squeeze.dim) and _rows(n) is not None:
        n = n.args[0]
    if match.is_call(n, aten.index_select.default) and n.args[1] == 0:
        x, index = n.args[0], [n.args[2]]
    elif match.is_call(n, aten.index.Tensor):
        x, index = n.args[0], list(n.args[1])
    else:
        return None
    while index and index[0] is None and match.is_call(x, aten.unsqueeze.default) and x.args[1] == 0:
        x, index = x.args[0], index[1:]
    coordinates = [read_coordinate(i) for i in index]
    return (x, coordinates) if coordinates and None not in coordinates else None


def _rows(n: fx.Node) -> bool | None:
    """True where ``n`` keeps the elements of rows together, at most with a dimension of one more or less."""
    a, b = ([s for s in match.value(x).shape if s != 1] for x in (n, n.args[0]))
    return True if a == b else None


@dataclass(frozen=True)
class Added:
    """One expert's rows, where they are added to a value or written into it."""

    node: fx.Node
    base: fx.Node
    rows: fx.Node
    coordinates: tuple[Coordinate, ...]
    adds: bool

    @property
    def mask(self) -> Mask:
        return self.coordinates[0].mask


def read_added(n: fx.Node) -> Added | None:
    """``n`` as one expert's share of what a loop computes; None for other values."""
    if match.is_call(n, aten.index_add.default):
        base, dim, index, rows = n.args[:4]
        coordinate = read_coordinate(index) if dim == 0 and n.kwargs.get("alpha", 1) == 1 else None
        return Added(n, base, rows, (coordinate,), True) if coordinate else None
    if not match.is_call(n, aten.index_put.default):
        return None
    base, index, rows = n.args[:3]
    coordinates = tuple(read_coordinate(i) for i in index)
    if None in coordinates:
        return None
    if match.argument(n, "accumulate", False):
        return Added(n, base, rows, coordinates, True)
    for before, added in match.operands(match.uncast(rows), aten.add.Tensor):
        same = taken(match.uncast(before)) if isinstance(before, fx.Node) else None
        if same is not None and same[0] is base and tuple(same[1]) == coordinates:
            return Added(n, base, added, coordinates, True)
    return Added(n, base, rows, coordinates, False)


def chains(gm: fx.GraphModule) -> list[list[Added]]:
    """What the experts of each loop add or write, in the order in which they do."""
    results: list[list[Added]] = []
    ends: dict[fx.Node, list[Added]] = {}
    for node in gm.graph.nodes:
        added = read_added(node) if node.op == "call_function" else None
        if added is None:
            continue
        chain = ends.pop(added.base, None)
        if chain is None:
            chain = []
            results.append(chain)
        elif set(added.base.users) - {added.node} - _reads(added):
            raise Miss(f"{added.base.name} is read between two experts")
        chain.append(added)
        ends[added.node] = chain
    return results


def _reads(added: Added) -> set[fx.Node]:
    """The reading of the base in ``x[rows] += ...``."""
    return {u for u in added.base.users if u is not added.node and (t := taken(u)) and tuple(t[1]) == added.coordinates}


def tokens_of(x: fx.Node, coordinates: list[Coordinate] | tuple[Coordinate, ...]) -> int | None:
    """k when ``coordinates`` take the token of each pair out of x [tokens, ...], of k choices each; None where they
    take something else."""
    choices, (first, *_) = match.value(coordinates[0].mask.choices), coordinates
    if len(coordinates) == 1 and first.dim == 0 and choices.dim() == 1:
        return first.divisor if match.value(x).shape[0] * first.divisor == choices.numel() else None
    ordered = [c.dim for c in coordinates] == list(range(len(coordinates))) and all(c.divisor == 1 for c in coordinates)
    count = len(coordinates)
    if not ordered or tuple(match.value(x).shape[:count]) != tuple(choices.shape[:count]):
        return None
    return math.prod(choices.shape[count:])
