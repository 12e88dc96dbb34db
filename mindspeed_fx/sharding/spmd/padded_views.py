"""Views and parts of padded values: the same axes in other dimensions (:mod:`padded`)."""

from __future__ import annotations

import math
from typing import Any, Sequence

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Shard

from mindspeed_fx.graph.op_sets import RESHAPES, UNIT_DIMENSIONS, order_of
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.sharding.spmd import kept_whole
from mindspeed_fx.sharding.spmd.padded import (
    Axes,
    Axis,
    Called,
    Padded,
    aligned,
    as_stored,
    dims_of,
    is_padded_axes,
    place,
    plain,
    stored_of,
    stored_size,
    undivided,
    wrap,
)
from mindspeed_fx.sharding.spmd.redistribute import groups, reshape

aten = torch.ops.aten
VIEWS = (*RESHAPES, *UNIT_DIMENSIONS, aten.view_as.default, aten.reshape_as.default, aten.ravel.default)

PARTS = (
    aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.split_with_sizes.default, aten.split.Tensor,
    aten.chunk.default, aten.unbind.int,
)  # fmt: skip


def view(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """The same axes, parted anew; what is not padded may be parted further."""
    x, shape = args[0], node.meta["val"].shape
    dims = regrouped([a for axes in x.dims for a in axes], shape)
    if dims is None:
        return NotImplemented
    return wrap(reshape(x.stored, [stored_size(axes) for axes in dims]), dims, x.zero)


def regrouped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axes] | None:
    """``axes`` one behind the other as dimensions of these sizes; None: a padded one would be parted."""
    rest, dims = [a for a in axes if a.stored != 1], []
    for size in shape:
        own: list[Axis] = []
        while math.prod(a.size for a in own) < size:
            if not rest:
                return None
            missing, axis = size // math.prod(a.size for a in own), rest.pop(0)
            if axis.size > missing:
                if axis.size != axis.stored or axis.size % missing:
                    return None
                rest.insert(0, Axis(axis.size // missing, axis.size // missing))
                axis = Axis(missing, missing)
            own.append(axis)
        if math.prod(a.size for a in own) != size:
            return None
        dims.append(joined_plain(own) or plain(1))
    return dims if not any(a.size != 1 or a.stored != 1 for a in rest) else None


def parted_later(node: fx.Node) -> dict[int, int]:
    """Dimension of ``node`` -> the first of those that the view which reads it makes of it."""
    before, result = node.meta["val"].shape, {}
    for user in node.users:
        if user.target not in VIEWS:
            continue
        for old, new in groups(before, user.meta["val"].shape):
            sizes = [n for n in user.meta["val"].shape[new.start : new.stop] if n != 1]
            if len(old) == 1 and len(sizes) > 1:
                result[old.start] = sizes[0]
    return result


def joined_plain(axes: Sequence[Axis]) -> Axes:
    """Neighbours without padding as one."""
    result: list[Axis] = []
    for a in axes:
        if result and a.size == a.stored and result[-1].size == result[-1].stored:
            result[-1] = Axis(result[-1].size * a.size, result[-1].size * a.size)
        else:
            result.append(a)
    return tuple(result)


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
    other views."""
    shape = node.meta["val"].shape
    for old, new in groups(x.shape, shape) if kept_whole.may_pad() else ():
        over = [i for i, p in enumerate(stored_of(x).placements) if p == Shard(old.start)]
        ranks = math.prod(x.device_mesh.size(i) for i in over)
        sizes = [d for d in new if shape[d] != 1]
        if len(old) > 1 or len(sizes) < 2 or not over or is_padded_axes(dims_of(x)[old.start]):
            continue
        if shape[sizes[0]] % ranks == 0 or shape[sizes[0]] < ranks:
            continue
        gathered = undivided(x, [old.start])
        dims = regrouped([a for axes in dims_of(gathered) for a in axes], shape)
        if dims is None:
            continue
        viewed = wrap(reshape(stored_of(gathered), [stored_size(axes) for axes in dims]), dims)
        return place(viewed, [Shard(sizes[0]) if i in over else p for i, p in enumerate(stored_of(viewed).placements)])
    return NotImplemented
