"""Views and parts of padded values: the same axes in other dimensions (:mod:`padded`)."""

from __future__ import annotations

import math
from typing import Any, Sequence

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Shard

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph.op_sets import RESHAPES, UNIT_DIMENSIONS, order_of
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.sharding.spmd import kept_whole
from mindspeed_fx.sharding.spmd.padded import (
    Called,
    Padded,
    aligned,
    as_stored,
    dims_of,
    place,
    reshaped,
    stored_of,
    undivided,
    wrap,
)
from mindspeed_fx.sharding.spmd.padded_axes import is_padded_axes, plain, stored_size
from mindspeed_fx.sharding.spmd.redistribute import groups

aten = torch.ops.aten
VIEWS = (*RESHAPES, *UNIT_DIMENSIONS, aten.view_as.default, aten.reshape_as.default, aten.ravel.default)

PARTS = (
    aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.split_with_sizes.default, aten.split.Tensor,
    aten.chunk.default, aten.unbind.int,
)  # fmt: skip


def view(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """The same axes, parted anew; what is not padded may be parted further."""
    x, shape = args[0], node.meta["val"].shape
    result = reshaped(x, shape)
    return NotImplemented if result is None else result


@symbols.untraced
def parted_later(node: fx.Node) -> dict[int, int]:
    """Dimension of ``node`` -> the first of those that the view which reads it makes of it; none whose size data
    decide."""
    before, result = node.meta["val"].shape, {}
    for user in node.users:
        if user.target not in VIEWS:
            continue
        after = user.meta["val"].shape
        for old, new in groups([symbols.as_sample(n) for n in before], [symbols.as_sample(n) for n in after]):
            sizes = [n for n in after[new.start : new.stop] if symbols.is_known_by_data(n) or n != 1]
            if len(old) == 1 and len(sizes) > 1 and not symbols.is_known_by_data(sizes[0]):
                result[old.start] = sizes[0]
    return result


def reordering(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, order = args[0], order_of(node)
    if order is None or not isinstance(x, Padded):
        return NotImplemented
    return wrap(called(target, (x.stored, *args[1:]), kwargs), [x.dims[d] for d in order], x.zero)


def expand(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, shape = args[0], node.meta["val"].shape
    if not isinstance(x, Padded):
        return NotImplemented
    dims = aligned([x], shape)
    return wrap(called(aten.expand.default, (x.stored, [stored_size(axes) for axes in dims]), {}), dims, x.zero)


def part(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Slices, selections, splits along dimensions that are not padded."""
    x = args[0]
    if not isinstance(x, Padded):
        return NotImplemented
    dim, values = argument(node, "dim") % x.ndim, node.meta["val"]
    single = isinstance(values, torch.Tensor)
    shapes = [v.shape for v in ([values] if single else values)]
    if is_padded_axes(x.dims[dim]):
        return x if single and shapes[0] == x.shape else NotImplemented
    removed = target in (aten.select.int, aten.unbind.int)
    rest = [*x.dims[:dim], *x.dims[dim + 1 :]]
    results = called(target, (x.stored, *args[1:]), kwargs)
    wrapped = [
        wrap(r, rest if removed else [*x.dims[:dim], plain(shape[dim]), *x.dims[dim + 1 :]], x.zero)
        for r, shape in zip([results] if single else results, shapes)
    ]
    return wrapped[0] if single else tuple(wrapped)


def cat(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Beside each other along a dimension that is not padded."""
    tensors, shape = args[0], node.meta["val"].shape
    dim = argument(node, "dim") % len(shape)
    if target is aten.stack.default:
        dims = [*aligned(tensors, [n for d, n in enumerate(shape) if d != dim])]
        results = [as_stored(x, dict(enumerate(dims))) for x in tensors]
        return wrap(called(target, (results, *args[1:]), kwargs), [*dims[:dim], plain(shape[dim]), *dims[dim:]])
    if any(x.ndim != len(shape) for x in tensors):
        return NotImplemented
    dims = aligned(tensors, shape)
    if any(is_padded_axes(dims_of(x)[dim]) for x in tensors):
        return NotImplemented
    own = {d: axes for d, axes in enumerate(dims) if d != dim}
    results = [as_stored(x, own) for x in tensors]
    return wrap(called(target, (results, *args[1:]), kwargs), [*dims[:dim], plain(shape[dim]), *dims[dim + 1 :]])


def view_as_heads(node: fx.Node, x: DTensor | Padded) -> Any:
    """A view that makes of a divided dimension one that the ranks cannot share, gathered and padded; NotImplemented for
    other views, and where data decide sizes, which are others in every step."""
    shape = node.meta["val"].shape
    if any(symbols.is_known_by_data(n) for n in shape):
        return NotImplemented
    for dim, outer, over in _uneven_heads(x, shape) if kept_whole.may_pad() else ():
        gathered = undivided(x, [dim])
        viewed = reshaped(gathered, shape)
        if viewed is None:
            continue
        return place(viewed, [Shard(outer) if i in over else p for i, p in enumerate(stored_of(viewed).placements)])
    return NotImplemented


@symbols.untraced
def _uneven_heads(x: DTensor | Padded, shape: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """(divided dimension of ``x``, the outer one of those that it becomes in ``shape``, mesh dimensions) where ranks
    cannot share the outer one evenly."""
    results = []
    for old, new in groups(x.shape, shape):
        over = [i for i, p in enumerate(stored_of(x).placements) if p == Shard(old.start)]
        ranks = math.prod(x.device_mesh.size(i) for i in over)
        sizes = [d for d in new if shape[d] != 1]
        if len(old) > 1 or len(sizes) < 2 or not over or is_padded_axes(dims_of(x)[old.start]):
            continue
        if shape[sizes[0]] % ranks and shape[sizes[0]] >= ranks:
            results.append((old.start, sizes[0], over))
    return results
