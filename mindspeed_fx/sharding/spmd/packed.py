"""Values in which several tensors lie side by side along a divided dimension: a packed projection and what comes of it.

Of a weight that packs queries, keys and values each rank holds its part of each of the three, side by side. Told to
DTensor as parts of the whole these would be other rows. So the value is :class:`Packed`: a DTensor of the same elements
in the order of the ranks, which operators that do not ask for the order along that dimension (a product, a transposed
copy, one element at a time, a convolution of each channel) take as it is. A split at the edges of the pieces gives
plain parts of each. A view that makes one dimension of the pieces gives :class:`Pieces`, which are taken apart by
index. Everything else gets the whole, gathered and in order::

    rank 0: [q0 k0 v0]   joined [q0 k0 v0 q1 k1 v1], divided by rank
    rank 1: [q1 k1 v1]   whole  [q0 q1 k0 k1 v0 v1];  split -> [q0 | q1], [k0 | k1], [v0 | v1]
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from mindspeed_fx.graph.constants import integers_of
from mindspeed_fx.graph.op_sets import IDENTITIES, RESHAPES, UNIT_DIMENSIONS, is_cast, order_of
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.sharding.constraint import constrain
from mindspeed_fx.sharding.spmd import aten_rules, padded
from mindspeed_fx.sharding.spmd.parts import from_parts
from mindspeed_fx.sharding.spmd.redistribute import placed_at, reshape

aten = torch.ops.aten
Called = Callable[[Any, tuple, dict], Any]
"""Runs an operator on DTensors."""
GATES = (torch.ops.mindspeed.swiglu.default, torch.ops.mindspeed.glu.default)
"""(x, up or None, ...): without ``up``, gate and up are the halves of x."""


@dataclass(eq=False)
class Packed:
    """Pieces side by side along ``dim``, of which each rank of mesh dimension ``over`` has its parts."""

    joined: DTensor
    """In the order of the ranks, divided over ``over`` along ``dim``."""
    dim: int
    sizes: tuple[int, ...]
    """Of the pieces, whole."""
    over: int

    def like(self, joined: DTensor, dim: int) -> "Packed":
        """Another value of the same pieces."""
        placements = [Shard(dim) if i == self.over else p for i, p in enumerate(joined.placements)]
        return Packed(placed_at(joined, placements), dim, self.sizes, self.over)

    def part(self, start: int, end: int) -> Any:
        """Elements ``start`` to ``end`` of the whole: a DTensor, or several pieces; None: not at the edges of any."""
        edges = list(itertools.accumulate(self.sizes, initial=0))
        if start not in edges or end not in edges:
            return None
        first, last = edges.index(start), edges.index(end)
        if last <= first:
            return None
        n = self.joined.device_mesh.size(self.over)
        placements = [Replicate() if p.is_partial() else p for p in self.joined.placements]
        joined = placed_at(self.joined, placements)
        local = joined.to_local(grad_placements=placements).narrow(self.dim, start // n, (end - start) // n)
        result = from_parts(local, joined.device_mesh, placements)
        return result if last == first + 1 else Packed(result, self.dim, self.sizes[first:last], self.over)

    def whole(self) -> DTensor:
        """On every rank of ``over``, in order."""
        placements = [
            Replicate() if i == self.over or p.is_partial() else p for i, p in enumerate(self.joined.placements)
        ]
        gathered = placed_at(self.joined, placements)
        n = gathered.device_mesh.size(self.over)
        ranks = [r.split([s // n for s in self.sizes], self.dim) for r in _local(gathered).chunk(n, self.dim)]
        parts = [ranks[r][i] for i in range(len(self.sizes)) for r in range(n)]
        return from_parts(torch.cat(parts, self.dim), gathered.device_mesh, placements)


@dataclass(eq=False)
class Pieces:
    """Tensors that lie one behind the other along ``dim``."""

    parts: list[Any]
    """DTensors or padded values."""
    dim: int

    def part(self, start: int, end: int) -> Any:
        """Elements ``start`` to ``end`` of the whole; None: not at the edges of any tensor."""
        edges = list(itertools.accumulate((p.shape[self.dim] for p in self.parts), initial=0))
        if start not in edges or end not in edges or end <= start:
            return None
        parts = self.parts[edges.index(start) : edges.index(end)]
        return parts[0] if len(parts) == 1 else Pieces(parts, self.dim)

    def whole(self) -> DTensor:
        """All of them as one."""
        parts = [padded.whole(p) for p in self.parts]
        gathered = [placed_at(p, [Replicate() if q.is_partial() else q for q in p.placements]) for p in parts]
        return aten_rules.run(aten.cat.default, (gathered, self.dim), {})


def is_packed(*values: Any) -> bool:
    """Whether one of ``values``, or of what they hold, is packed."""
    return any(isinstance(x, (Packed, Pieces)) for x in pytree.tree_leaves(values))


def whole(x: Any) -> Any:
    """``x``, gathered where it is packed."""
    return x.whole() if isinstance(x, (Packed, Pieces)) else x


def same_pieces(x: Any) -> Callable[[Any], Any]:
    """What makes ``x`` of its joined value again."""
    if not isinstance(x, Packed):
        return whole
    return lambda joined: Packed(joined, x.dim, x.sizes, x.over)


def run(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``node``, the call ``target(*args, **kwargs)``, some of whose arguments are packed."""
    rule = _rule(target)
    result = NotImplemented if rule is None else rule(called, node, target, args, kwargs)
    if result is NotImplemented:
        args, kwargs = pytree.tree_map(whole, (args, kwargs))
        return target(*args, **kwargs) if target is operator.getitem else called(target, args, kwargs)
    return result


def _rule(target: Any) -> Callable | None:
    if target is operator.getitem:
        return lambda called, node, target, args, kwargs: (
            args[0][args[1]] if isinstance(args[0], tuple) else NotImplemented
        )
    if target is constrain:
        return _constrain
    if target in GATES:
        return _gate
    if target in PRODUCTS:
        return _product
    if target in PARTS:
        return _part
    if target in VIEWS:
        return _view
    if isinstance(target, torch._ops.OpOverload):
        if aten_rules.name_of(target) in ("conv1d", "conv2d", "conv3d", "causal_conv1d"):
            return _convolution
        if aten_rules.is_pointwise(target) or is_cast(target) or target in IDENTITIES:
            return _pointwise
        return _reordering
    return None


def _reordering(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, order = args[0], order_of(node)
    if target is aten.dropout.default:
        return x if not args[2] or args[1] == 0 else NotImplemented
    if order is None or not isinstance(x, (Packed, Pieces)):
        return NotImplemented
    dim = order.index(x.dim)
    if isinstance(x, Pieces):
        return Pieces([called(target, (p, *args[1:]), kwargs) for p in x.parts], dim)
    return x.like(called(target, (x.joined, *args[1:]), kwargs), dim)


def _pointwise(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, (DTensor, Packed, Pieces))]
    first = next(t for t in tensors if isinstance(t, (Packed, Pieces)))
    value = node.meta.get("val")
    if not isinstance(first, Packed) or not isinstance(value, torch.Tensor):
        return NotImplemented
    after = _ndim(first) - first.dim
    if any(isinstance(t, Pieces) for t in tensors) or any(
        (_ndim(t) - t.dim, t.sizes, t.over) != (after, first.sizes, first.over)
        for t in tensors
        if isinstance(t, Packed)
    ):
        return NotImplemented

    def joined(x: Any) -> Any:
        if isinstance(x, Packed):
            return x.joined
        if isinstance(x, DTensor) and x.ndim >= after and x.shape[x.ndim - after] > 1:
            return _ordered_by_rank(x, x.ndim - after, first)
        return x

    args, kwargs = pytree.tree_map(joined, (args, kwargs))
    return first.like(called(target, args, kwargs), value.ndim - after)


def _product(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """By a packed weight; what is added is packed alike."""
    at, out = PRODUCTS[target]
    weight = args[at]
    plain = all(isinstance(a, DTensor) for i, a in enumerate(args) if i != at and i == at - 1)
    if not isinstance(weight, Packed) or weight.dim != out or _ndim(weight) != 2 or not plain:
        return NotImplemented
    ndim = node.meta["val"].ndim
    other = 2 if target is aten.linear.default else 0 if target is aten.addmm.default else None
    args = list(args)
    args[at] = weight.joined
    if other is not None and len(args) > other and args[other] is not None:
        bias = args[other]
        if isinstance(bias, Packed) and (bias.sizes, bias.over) == (weight.sizes, weight.over):
            args[other] = bias.joined
        else:
            bias = whole(bias)
            args[other] = _ordered_by_rank(bias, bias.ndim - 1, weight)
    return weight.like(called(target, tuple(args), kwargs), ndim - 1)


def _convolution(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Of each channel by itself, where channels are packed."""
    x, weight = args[0], args[1]
    channels = node.args[0].meta["val"].shape[1]
    if not isinstance(x, Packed) or x.dim != 1 or argument(node, "groups", channels) != channels:
        return NotImplemented
    if _shape(weight)[0] != _shape(x)[1]:
        return NotImplemented
    others = [
        a.joined if isinstance(a, Packed) and (a.dim, a.sizes) == (0, x.sizes) else _ordered_by_rank(whole(a), 0, x)
        for a in args[1:3]
        if a is not None
    ]
    return x.like(called(target, (x.joined, *others, *args[1 + len(others) :]), kwargs), 1)


def _gate(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    if not isinstance(x, (Packed, Pieces)) or x.dim != _ndim(x) - 1 or "up" in kwargs:
        return NotImplemented
    half = _shape(x)[x.dim] // 2
    gate, up = x.part(0, half), x.part(half, 2 * half)
    if args[1:2] not in ((), (None,)) or not _is_plain(gate, up):
        return NotImplemented
    return called(target, (gate, up, *args[2:]), kwargs)


def _constrain(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, placed = args
    if isinstance(x, Packed) and x.joined.device_mesh.mesh_dim_names[x.over] not in dict(placed):
        return x.like(constrain(x.joined, placed), x.dim)
    return NotImplemented


# ------------------------------------------------------------------ along the packed dimension


def _part(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    if not isinstance(x, (Packed, Pieces)):
        return NotImplemented
    ndim, size = _ndim(x), _shape(x)[x.dim]
    if target is aten.index.Tensor:
        return _index(x, node, size)
    dim = argument(node, "dim") % ndim
    if dim != x.dim:
        return _other_dimension(called, x, target, dim, args, kwargs)
    if len(node.all_input_nodes) > 1:  # at places that data decide
        return NotImplemented
    edges = _edges(node, target, size)
    results = [None if e is None else x.part(*e) for e in edges]
    if any(r is None for r in results):
        return NotImplemented
    if target in (aten.select.int, aten.unbind.int):
        if not _is_plain(*results):
            return NotImplemented
        results = [padded.reshaped(r, [n for d, n in enumerate(r.shape) if d != x.dim]) for r in results]
    return results[0] if target in ONE else tuple(results)


def _edges(node: fx.Node, target: Any, size: int) -> list[tuple[int, int] | None]:
    """Start and end of every result."""
    if target is aten.slice.Tensor:
        start, end, step = argument(node, "start") or 0, argument(node, "end"), argument(node, "step")
        start, end, _ = slice(start, end).indices(size)
        return [(start, end) if step in (None, 1) else None]
    if target is aten.narrow.default:
        return [(argument(node, "start") % size, argument(node, "start") % size + argument(node, "length"))]
    if target is aten.select.int:
        return [(i := argument(node, "index") % size, i + 1)]
    if target is aten.unbind.int:
        return [(i, i + 1) for i in range(size)]
    sizes = [v.shape[argument(node, "dim") % v.ndim] for v in node.meta["val"]]
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends))


def _other_dimension(called: Called, x: Any, target: Any, dim: int, args: tuple, kwargs: dict) -> Any:
    """A part along a dimension that is not packed."""
    if target not in (aten.slice.Tensor, aten.narrow.default, aten.select.int):
        return NotImplemented
    gone = target is aten.select.int and dim < x.dim
    if isinstance(x, Pieces):
        return Pieces([called(target, (p, *args[1:]), kwargs) for p in x.parts], x.dim - gone)
    return x.like(called(target, (x.joined, *args[1:]), kwargs), x.dim - gone)


def _index(x: Packed | Pieces, node: fx.Node, size: int) -> Any:
    """By constant places that follow each other."""
    indices = node.args[1]
    places = integers_of(indices[x.dim]) if len(indices) > x.dim else None
    if places is None or sum(i is not None for i in indices) > 1:
        return NotImplemented
    places = [i % size for i in places]
    if places != list(range(places[0], places[0] + len(places))):
        return NotImplemented
    result = x.part(places[0], places[0] + len(places))
    return NotImplemented if result is None else result


def _view(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, after = args[0], node.meta["val"].shape
    if isinstance(x, Pieces):
        viewed = padded.viewed_parts(x.parts, x.dim, after)
        return NotImplemented if viewed is None else Pieces(*viewed)
    if not isinstance(x, Packed):
        return NotImplemented
    before = _shape(x)
    outer = math.prod(before[: x.dim])
    for j, size in enumerate(after):
        if math.prod(after[:j]) != outer or size == 1 != before[x.dim]:
            continue
        if size == before[x.dim]:
            return x.like(reshape(x.joined, after), j)
        unit, rest = divmod(before[x.dim], size)
        inner = math.prod(after[j:]) == math.prod(before[x.dim :])
        if rest or not inner or any(s % unit for s in x.sizes):
            return NotImplemented
        return Pieces([_viewed(x, i, after, j, unit) for i in range(len(x.sizes))], j)
    return NotImplemented


def _viewed(x: Packed, i: int, after: Sequence[int], j: int, unit: int) -> DTensor:
    """Piece ``i`` with ``after[j]`` in place of the packed dimension. A piece of fewer heads than ranks is whole on
    each of them."""
    start, n = sum(x.sizes[:i]), x.joined.device_mesh.size(x.over)
    piece, count = x.part(start, start + x.sizes[i]), x.sizes[i] // unit
    if count % n and (count > 1 or j >= len(after) - 2):
        piece = placed_at(piece, [Replicate() if k == x.over else p for k, p in enumerate(piece.placements)])
    return reshape(piece, [*after[:j], count, *after[j + 1 :]])


VIEWS = {*RESHAPES, *UNIT_DIMENSIONS}
PARTS = {
    aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default, aten.slice.Tensor, aten.narrow.default,
    aten.select.int, aten.unbind.int, aten.index.Tensor,
}  # fmt: skip
ONE = {aten.slice.Tensor, aten.narrow.default, aten.select.int}
"""Those of :data:`PARTS` with one result."""
PRODUCTS: dict[Any, tuple[int, int]] = {
    aten.linear.default: (1, 0),
    aten.addmm.default: (2, 1),
    aten.mm.default: (1, 1),
    aten.matmul.default: (1, 1),
}
"""Operator -> position of the weight, and the dimension of it that results have."""


# ------------------------------------------------------------------ DTensors


def _ordered_by_rank(x: DTensor, dim: int, like: Packed) -> DTensor:
    """``x``, whole along ``dim``, as ``like.joined`` is along its packed dimension."""
    placements = [Replicate() if i == like.over or p.is_partial() else p for i, p in enumerate(x.placements)]
    x = placed_at(x, placements)
    n = x.device_mesh.size(like.over)
    pieces = [piece.chunk(n, dim) for piece in _local(x).split(like.sizes, dim)]
    ordered = from_parts(torch.cat([p[r] for r in range(n) for p in pieces], dim), x.device_mesh, placements)
    return placed_at(ordered, [Shard(dim) if i == like.over else p for i, p in enumerate(placements)])


def _local(x: DTensor) -> torch.Tensor:
    return x.to_local(grad_placements=x.placements)


def _is_plain(*values: Any) -> bool:
    return all(isinstance(x, (DTensor, padded.Padded)) for x in values)


def _shape(x: Any) -> torch.Size:
    if isinstance(x, Packed):
        return x.joined.shape
    if isinstance(x, Pieces):
        shape = list(x.parts[0].shape)
        shape[x.dim] = sum(p.shape[x.dim] for p in x.parts)
        return torch.Size(shape)
    return x.shape


def _ndim(x: Any) -> int:
    return len(_shape(x))
