"""Products of padded values, tables of embeddings, and experts: sums over padding have zeros in one factor
(:mod:`padded`)."""

from __future__ import annotations

import itertools
import math
from typing import Any, Sequence

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Shard

from mindspeed_fx.compat import dtensor
from mindspeed_fx.sharding.spmd import kept_whole, packed, token_dispatch
from mindspeed_fx.sharding.spmd.expected_collectives import sends_inside
from mindspeed_fx.sharding.spmd.padded import (
    Called,
    Padded,
    as_stored,
    broadcast,
    dims_of,
    masked,
    stored_of,
    undivided,
    whole,
    wrap,
)
from mindspeed_fx.sharding.spmd.padded_axes import Axes, Axis, is_padded_axes, joined_plain, plain, stored_size
from mindspeed_fx.sharding.spmd.padded_views import parted_later
from mindspeed_fx.sharding.spmd.redistribute import placed_at

aten = torch.ops.aten


def product(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Sums over a padded dimension have zeros in the padding of one factor; rows and columns stay padded."""
    if node.meta["val"].ndim < 2:
        return NotImplemented
    at = 1 if target in (aten.addmm.default, aten.baddbmm.default) else 0
    x, y = args[at], args[at + 1]
    out, inner = (0, 1) if target is aten.linear.default else (y.ndim - 1, y.ndim - 2)
    if x.ndim < 2 or y.ndim < 2:
        return NotImplemented
    shape = node.meta["val"].shape
    summed = next((a for a in (dims_of(x)[-1], dims_of(y)[inner]) if is_padded_axes(a)), None)
    batch = [plain(n) for n in shape[:-2]]
    if y.ndim > 2:
        rows = [dims_of(t)[:-2] for t in (x, y)]
        for own in rows:
            for d, axes in enumerate(own, len(batch) - len(own)):
                batch[d] = axes if is_padded_axes(axes) and not is_padded_axes(batch[d]) else batch[d]
        row = dims_of(x)[-2]
    else:
        batch, row = list(dims_of(x)[:-2]), dims_of(x)[-2]
    column = dims_of(y)[out]
    x_own = {d + x.ndim - 2 - len(batch): a for d, a in enumerate(batch) if d + x.ndim - 2 - len(batch) >= 0}
    x_own = {d: a for d, a in x_own.items() if x.shape[d] > 1} | {x.ndim - 2: row}
    y_own = {out: column}
    if y.ndim > 2:
        lead = y.ndim - 2 - len(batch)
        y_own |= {d + lead: a for d, a in enumerate(batch) if d + lead >= 0 and y.shape[d + lead] > 1}
    if summed is not None:
        if len(summed) > 1 and y.shape[out] > math.prod(x.shape[:-1]):  # less to gather than of the weight
            x = undivided(x, [x.ndim - 1]) if is_padded_axes(dims_of(x)[-1]) else x
            return called(target, tuple(x if i == at else a for i, a in enumerate(args)), kwargs)
        x, y = _without_summed_padding(x, y, inner, summed, x_own, y_own)
    else:
        x, y = as_stored(x, x_own), as_stored(y, y_own)
    dims = [*batch, row, column]
    rest = list(args)
    rest[at], rest[at + 1] = x, y
    other = 2 if target is aten.linear.default else 0 if at else None
    if other is not None and len(args) > other and args[other] is not None:
        rest[other] = broadcast(args[other], dims)
    return wrap(called(target, tuple(rest), kwargs), dims)


def _without_summed_padding(
    x: Any, y: Any, inner: int, summed: Axes, x_own: dict[int, Axes], y_own: dict[int, Axes]
) -> tuple[DTensor, DTensor]:
    last = x.ndim - 1
    zero_y = not isinstance(y, Padded) or not is_padded_axes(y.dims[inner]) or y.zero
    stored_x = as_stored(x, {**x_own, last: summed}, 0)
    stored_y, before = as_stored(y, {**y_own, inner: summed}, 0), y
    if not zero_y and not (isinstance(x, Padded) and x.zero):
        only = tuple(summed if d == inner else plain(n) for d, n in enumerate(stored_y.shape))
        stored_y = masked(Padded(stored_y, only), 0)
    # each rank has the summands of its part of x
    placed = [Shard(inner) if p.is_shard(last) else q for p, q in zip(stored_x.placements, stored_y.placements)]
    stored_y = placed_at(stored_y, placed)
    if isinstance(before, DTensor) and before.requires_grad:
        _says(before, stored_y)
    return stored_x, stored_y


def _moved(weight: Any, dims: dict[int, Axes], placements: Sequence[Any]) -> DTensor:
    """A weight gathered, padded and divided again."""
    result = placed_at(as_stored(weight, dims, 0), placements)
    _says(stored_of(weight), result)
    return result


def _says(weight: DTensor, moved: DTensor) -> None:
    """What gathering a weight, and its gradient, sends."""
    for i, (p, q) in enumerate(zip(weight.placements, moved.placements)):
        if p == q and p.is_shard():
            for x, backward in ((weight, False), (moved, True)):
                size = dtensor.local_numel(x) * x.dtype.itemsize
                sends_inside("all_gather", i, size, backward, "weights of whole heads")


def with_whole_heads(node: fx.Node, target: Any, args: tuple) -> tuple:
    """Arguments of a linear layer whose results are viewed as heads that ranks cannot share, though they share the
    results: the weight moved so that the first ranks have the same number of whole heads, and zeros behind. It is
    smaller than the results, which would be gathered otherwise."""
    at = 2 if target is aten.addmm.default else 1
    weight, x = args[at], args[at - 1]
    out = 0 if target is aten.linear.default else 1
    heads = parted_later(node).get(node.meta["val"].ndim - 1)
    if heads is None or not kept_whole.may_pad() or not all(isinstance(t, (DTensor, Padded)) for t in (weight, x)):
        return args
    if weight.ndim != 2:
        return args
    over = [i for i, p in enumerate(stored_of(weight).placements) if p == Shard(out)]
    ranks = math.prod(weight.device_mesh.size(i) for i in over)
    if heads % ranks == 0 or heads < ranks or weight.shape[1 - out] > math.prod(x.shape[:-1]):
        return args
    names = [weight.device_mesh.mesh_dim_names[i] for i in over]
    axes = _heads(heads, weight.shape[out] // heads, ranks, names, blank=True)
    placements = stored_of(weight).placements
    stored = _moved(weight, {out: axes}, placements)
    moved = Padded(stored, tuple(axes if d == out else plain(n) for d, n in enumerate(weight.shape)), zero=True)
    return (*args[:at], moved, *args[at + 1 :])


def _heads(count: int, width: int, ranks: int, names: Sequence[str], blank: bool = False) -> Axes:
    axis = Axis(count, math.ceil(count / ranks) * ranks, blank)
    kept_whole.note_padding(count, axis.stored, ranks, names)
    return (axis, Axis(width, width)) if width > 1 else (axis,)


def of_packed(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """A product for each of the pieces, of rows that are padded."""
    at, out = packed.PRODUCTS[target]
    weight, bias_at = args[at], 2 if target is aten.linear.default else 0 if target is aten.addmm.default else None
    if not isinstance(weight, packed.Packed) or weight.dim != out or packed.is_packed(args[at - 1], kwargs):
        return NotImplemented
    bias = args[bias_at] if bias_at is not None and len(args) > bias_at else None
    if isinstance(bias, DTensor) and bias.ndim == 1:
        ends = list(itertools.accumulate(weight.sizes))
        biases = [called(aten.narrow.default, (bias, 0, end - n, n), {}) for end, n in zip(ends, weight.sizes)]
    elif bias is None or (isinstance(bias, packed.Packed) and bias.sizes == weight.sizes):
        biases = [None if bias is None else _piece(bias, i) for i in range(len(weight.sizes))]
    else:
        return NotImplemented
    parts = []
    for i, b in enumerate(biases):
        arg = list(args)
        arg[at] = _piece(weight, i)
        if b is not None and bias_at is not None:
            arg[bias_at] = b
        parts.append(called(target, tuple(arg), kwargs))
    return packed.Pieces(parts, node.meta["val"].ndim - 1)


def _piece(x: packed.Packed, i: int) -> DTensor:
    start = sum(x.sizes[:i])
    return x.part(start, start + x.sizes[i])


def embedding(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Rows that are padding no index names; those of indices that are padding are padding."""
    weight, ids, *rest = args
    if any(rest[1:]) or any(kwargs.get(n) for n in ("scale_grad_by_freq", "sparse")):
        return NotImplemented
    dims = (*dims_of(ids), dims_of(weight)[1])
    return wrap(called(target, (stored_of(weight), stored_of(ids), *rest), kwargs), dims)


def experts(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Experts that are padding have no rows: theirs end where those of the last one do."""
    x, weight, ends = args
    if not isinstance(weight, Padded) or isinstance(x, Padded) or weight.padded_dims != [0]:
        return NotImplemented
    ends = None if ends is None else as_stored(ends, {0: weight.dims[0]})
    return called(target, (x, weight.stored, ends), kwargs)


def permute(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Tokens that are padding go to experts as others do; nobody reads what comes back."""
    tokens, chosen = args
    rows, each = dims_of(tokens)[0], chosen.shape[0] // tokens.shape[0]
    every = joined_plain((*rows, Axis(each, each)))
    result, _ = target(as_stored(tokens, {0: rows}), as_stored(chosen, {0: every}))
    result.axes = rows
    return result, result


def unpermute_tokens(rows: Any, order: Any, probs: Any, k: int) -> Any:
    """:func:`token_dispatch.unpermute_tokens`, of tokens that may be padded."""
    axes = getattr(order, "axes", None)
    if axes is None:
        return token_dispatch.unpermute_tokens(whole(rows), order, whole(probs), k)
    probs = None if probs is None else as_stored(probs, {0: axes})
    result = token_dispatch.unpermute_tokens(rows, order, probs, k)
    each = result.shape[0] // stored_size(axes)
    return wrap(result, [joined_plain((*axes, Axis(each, each))), plain(result.shape[1])])


PRODUCTS = (
    aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default, aten.addmm.default,
    aten.baddbmm.default,
)  # fmt: skip

LINEAR = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.addmm.default)
"""Products by a weight, which is the second factor."""
