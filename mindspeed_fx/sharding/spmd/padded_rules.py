"""How operators run on padded values: on what is stored, with other sizes, where padding stays padding; see
:mod:`padded`.

What may be divided along a dimension may be padded there, for each part of the result is then made of the same part of
the arguments: the operators' own rules (:mod:`mindspeed_fx.kernels.sharding`, :func:`aten_rules.strategies`) say which.
Views, products, sums, losses and attention have rules here. Without a rule an operator gets the whole, and is named.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, Iterable, Sequence

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor, Shard
from torch.utils import _pytree as pytree

from mindspeed_fx.compat.placements import PARTIAL, Even
from mindspeed_fx.graph import op_sets
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.op_sets import IDENTITIES, RESHAPES, UNIT_DIMENSIONS, is_cast, order_of
from mindspeed_fx.graph.schema import all_arguments, argument
from mindspeed_fx.sharding.spmd import aten_rules, kept_whole, losses, operators, padded_attention, token_dispatch, vocabulary
from mindspeed_fx.sharding.spmd.experts import OwnRows
from mindspeed_fx.sharding.spmd.packed import is_packed
from mindspeed_fx.sharding.spmd.padded import (
    Axes,
    Axis,
    Padded,
    as_stored,
    dims_of,
    is_padded_axes,
    masked,
    place,
    plain,
    stored_of,
    stored_size,
    undivided,
    whole,
    wrap,
)
from mindspeed_fx.sharding.spmd.redistribute import groups, placed_at, reshape

aten, ops = torch.ops.aten, torch.ops.mindspeed
Called = Callable[[Any, tuple, dict], Any]
"""Runs an operator on DTensors."""

FINITE = frozenset(
    "add sub rsub mul neg abs silu gelu relu leaky_relu elu sigmoid tanh softplus exp sin cos square clamp clamp_min "
    "clamp_max maximum minimum where masked_fill to _to_copy clone contiguous detach alias type_as float double half "
    "bfloat16 eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not hardswish mish "
    "zeros_like ones_like full_like empty_like".split()
)
"""Elementwise operators that are finite, and have a finite gradient, at zero."""


def run(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``node``, the call ``target(*args, **kwargs)``, some of whose arguments are padded."""
    rule = None if is_packed(args, kwargs) or (_is_routed(args, kwargs) and target not in OF_EXPERTS) else _rule(target)
    result = NotImplemented if rule is None else rule(called, node, target, args, kwargs)
    if result is not NotImplemented:
        return result
    if target not in GATHERS and any(
        x.is_floating_point() for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Padded)
    ):
        kept_whole.note(f"{target} is computed of whole values, which are padded before it")
    return called(target, *pytree.tree_map(whole, (args, kwargs)))


def _is_routed(*values: Any) -> bool:
    return any(isinstance(x, OwnRows) for x in pytree.tree_leaves(values))


def _rule(target: Any) -> Callable | None:
    if target in RULES:
        return RULES[target]
    if not isinstance(target, torch._ops.OpOverload) or op_sets.is_random(target):
        return None
    name = aten_rules.name_of(target)
    if target._schema.is_mutable:
        return _in_place
    if aten_rules.is_pointwise(target) or is_cast(target) or target in IDENTITIES or name in FINITE:
        return _elementwise
    if target.namespace == "mindspeed":
        return _by_own_strategies
    if name in ("new_zeros", "new_ones", "new_full", "new_empty"):
        return lambda called, node, target, args, kwargs: called(target, (stored_of(args[0]), *args[1:]), kwargs)
    return NAMED.get(name, _by_strategies)


# ------------------------------------------------------------------ element by element


def aligned(tensors: Iterable[Any], shape: Sequence[int]) -> list[Axes]:
    """The dimensions of what padded and other tensors are broadcast to."""
    result = [plain(n) for n in shape]
    for x in tensors:
        for d, axes in enumerate(dims_of(x), len(shape) - x.ndim):
            if is_padded_axes(axes) and not is_padded_axes(result[d]):
                result[d] = axes
    return result


def broadcast(x: Any, dims: Sequence[Axes], fill: float | None = None) -> DTensor:
    """``x`` as an operand of a result of these dimensions."""
    shift = len(dims) - x.ndim
    own = {d - shift: axes for d, axes in enumerate(dims) if d >= shift and x.shape[d - shift] > 1}
    return as_stored(x, own, fill)


def _tensors(*values: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, (DTensor, Padded))]


def _elementwise(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    value, tensors = node.meta.get("val"), _tensors(args, kwargs)
    if not isinstance(value, torch.Tensor):
        return NotImplemented
    if is_cast(target) or aten_rules.name_of(target).endswith("_like"):  # others say a type alone
        if not isinstance(args[0], Padded):
            return NotImplemented
        rest = pytree.tree_map(stored_of, args[1:])
        dims, zero = args[0].dims, args[0].zero and is_cast(target)
        return wrap(called(target, (args[0].stored, *rest), kwargs), dims, zero)
    dims = aligned(tensors, value.shape)
    finite = aten_rules.name_of(target) in FINITE or not any(a.blank for axes in dims for a in axes)

    def operand(x: Any) -> Any:
        if not isinstance(x, (DTensor, Padded)):
            return x
        stored = broadcast(x, dims)
        if finite or not x.is_floating_point():
            return stored
        shift = len(dims) - x.ndim
        own = tuple(axes if x.shape[d] > 1 else plain(1) for d, axes in enumerate(dims[shift:]))
        return masked(Padded(stored, own), 1.0)

    args, kwargs = pytree.tree_map(operand, (args, kwargs), is_leaf=lambda x: isinstance(x, Padded))
    zero = len(tensors) == 1 and target in IDENTITIES and tensors[0].zero
    return wrap(called(target, args, kwargs), dims, zero)


def _in_place(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """A write element by element, to what is stored."""
    x, dims = args[0], dims_of(args[0])
    rest = [broadcast(a, dims) if isinstance(a, (DTensor, Padded)) else a for a in args[1:]]
    result = called(target, (stored_of(x), *rest), kwargs)
    return x if isinstance(x, Padded) else result


def writes_elsewhere(gm: fx.GraphModule) -> fx.Node | None:
    """An operator of ``gm`` that writes to a view, or in another way than element by element, to a value of the graph: of
    a padded one it may write to a copy."""
    for node in gm.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        made = [a for a in written_nodes(node) if a.op == "call_function"]
        views = [a for a in made if op_sets.is_view(a.target) or op_sets.may_copy(a.target)]
        if views or (made and not aten_rules.is_pointwise(target)):
            return node
    return None


def _dropout(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """The numbers are those that one device draws, for the true size."""
    x, p, train = args
    if not train or p == 0:
        return x
    if p == 1:
        return wrap(x.stored * 0, x.dims)
    ones = operators.whole(torch.ones(x.shape, dtype=x.dtype, device=x.stored.device), x.stored)
    return wrap(x.stored * broadcast(called(target, (ones, p, True), {}), x.dims), x.dims)


# ------------------------------------------------------------------ by the rules of division


def _stored_by(rows: Sequence[tuple[Sequence[Any], Sequence[Any]]], tensors: Sequence[Any]) -> Any:
    """(dimension -> padding for each tensor, padded dimension -> that of each result) by rules of division; None: a
    padded dimension is in none of them."""
    dims: list[dict[int, Axes]] = [{} for _ in tensors]
    results: list[list[tuple[int, Axes]]] = []
    for k, x in enumerate(tensors):
        for d in x.padded_dims if isinstance(x, Padded) else ():
            if d in dims[k]:
                if dims[k][d] != x.dims[d]:
                    return None
                continue
            row = next((r for r in rows if _is_plain(r, k, d)), None)
            if row is None:
                return None
            for other, p, own in zip(tensors, row[1], dims):
                if not isinstance(p, str):
                    if other.shape[p] != x.shape[d] or p in own:
                        return None
                    own[int(p)] = x.dims[d]
            results.append([(i, int(p), x.dims[d]) for i, p in enumerate(row[0]) if not isinstance(p, str)])
    return dims, [entry for row in results for entry in row]


def _is_plain(row: tuple[Sequence[Any], Sequence[Any]], k: int, d: int) -> bool:
    """Whether a rule divides dimension ``d`` of tensor ``k``, in parts of any size, and leaves no sum over ranks."""
    results, inputs = row
    placed = [*results, *inputs]
    return inputs[k] == d and not any(isinstance(p, Even) or p == PARTIAL for p in placed)


def _run_stored(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict, rows: Sequence[Any]) -> Any:
    tensors = _tensors(args, kwargs)
    found = _stored_by(rows, tensors)
    if found is None:
        return NotImplemented
    dims, placed = found
    values = node.meta["val"]
    shapes = [getattr(v, "shape", None) for v in ([values] if isinstance(values, torch.Tensor) else values)]
    if any(shapes[i][d] != math.prod(a.size for a in axes) for i, d, axes in placed):
        return NotImplemented  # the result is longer or shorter there
    stored = iter([as_stored(x, own) for x, own in zip(tensors, dims)])
    args, kwargs = pytree.tree_map(
        lambda x: next(stored) if isinstance(x, (DTensor, Padded)) else x,
        (args, kwargs),
        is_leaf=lambda x: isinstance(x, Padded),
    )
    return _wrapped(called(target, args, kwargs), node, placed)


def _wrapped(results: Any, node: fx.Node, placed: Sequence[tuple[int, int, Axes]]) -> Any:
    values = node.meta["val"]
    single = isinstance(values, torch.Tensor)
    outputs = []
    for i, (x, value) in enumerate(zip([results] if single else results, [values] if single else values)):
        own = {d: axes for j, d, axes in placed if j == i}
        outputs.append(
            wrap(x, [own.get(d, plain(n)) for d, n in enumerate(value.shape)]) if isinstance(x, DTensor) else x
        )
    return outputs[0] if single else tuple(outputs)


def _by_own_strategies(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    from mindspeed_fx.kernels import REGISTRY
    from mindspeed_fx.kernels.sharding import strategies

    own = next((o for o in REGISTRY.values() if o.overload is target), None)
    if own is None or own.sharding is None:
        return NotImplemented
    rows = strategies(own, all_arguments(target, args, kwargs))
    return _run_stored(called, node, target, args, kwargs, rows)


def _by_strategies(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    tensors = _tensors(args, kwargs)
    if not tensors:
        return NotImplemented
    count = 1 if isinstance(node.meta["val"], torch.Tensor) else len(node.meta["val"])
    rows = [([d] * count, inputs) for d, inputs in aten_rules.strategies(target, args, kwargs, tensors)]
    return _run_stored(called, node, target, args, kwargs, rows)


# ------------------------------------------------------------------ views and parts


def _view(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """The same axes, parted anew; what is not padded may be parted further."""
    x, shape = args[0], node.meta["val"].shape
    dims = _regrouped([a for axes in x.dims for a in axes], shape)
    if dims is None:
        return NotImplemented
    return wrap(reshape(x.stored, [stored_size(axes) for axes in dims]), dims, x.zero)


def _regrouped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axes] | None:
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
        dims.append(_joined_plain(own) or plain(1))
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


def _joined_plain(axes: Sequence[Axis]) -> Axes:
    """Neighbours without padding as one."""
    result: list[Axis] = []
    for a in axes:
        if result and a.size == a.stored and result[-1].size == result[-1].stored:
            result[-1] = Axis(result[-1].size * a.size, result[-1].size * a.size)
        else:
            result.append(a)
    return tuple(result)


def _reordering(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, order = args[0], order_of(node)
    if order is None or not isinstance(x, Padded):
        return NotImplemented
    return wrap(called(target, (x.stored, *args[1:]), kwargs), [x.dims[d] for d in order], x.zero)


def _expand(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, shape = args[0], node.meta["val"].shape
    if not isinstance(x, Padded):
        return NotImplemented
    dims = aligned([x], shape)
    return wrap(called(aten.expand.default, (x.stored, [stored_size(axes) for axes in dims]), {}), dims, x.zero)


def _part(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
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


def _cat(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
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


# ------------------------------------------------------------------ products


def _product(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
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
    stored_y = as_stored(y, {**y_own, inner: summed}, 0)
    if not zero_y and not (isinstance(x, Padded) and x.zero):
        only = tuple(summed if d == inner else plain(n) for d, n in enumerate(stored_y.shape))
        stored_y = masked(Padded(stored_y, only), 0)
    # each rank has the summands of its part of x
    placed = [Shard(inner) if p.is_shard(last) else q for p, q in zip(stored_x.placements, stored_y.placements)]
    return stored_x, placed_at(stored_y, placed)


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
    stored = placed_at(as_stored(weight, {out: axes}, 0), placements)
    moved = Padded(stored, tuple(axes if d == out else plain(n) for d, n in enumerate(weight.shape)), zero=True)
    return (*args[:at], moved, *args[at + 1 :])


def _heads(count: int, width: int, ranks: int, names: Sequence[str], blank: bool = False) -> Axes:
    axis = Axis(count, math.ceil(count / ranks) * ranks, blank)
    kept_whole.note_padding(count, axis.stored, ranks, names)
    return (axis, Axis(width, width)) if width > 1 else (axis,)


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
        dims = _regrouped([a for axes in dims_of(gathered) for a in axes], shape)
        if dims is None:
            continue
        viewed = wrap(reshape(stored_of(gathered), [stored_size(axes) for axes in dims]), dims)
        return place(viewed, [Shard(sizes[0]) if i in over else p for i, p in enumerate(stored_of(viewed).placements)])
    return NotImplemented


def _embedding(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Rows that are padding no index names; those of indices that are padding are padding."""
    weight, ids, *rest = args
    if any(rest[1:]) or any(kwargs.get(n) for n in ("scale_grad_by_freq", "sparse")):
        return NotImplemented
    dims = (*dims_of(ids), dims_of(weight)[1])
    return wrap(called(target, (stored_of(weight), stored_of(ids), *rest), kwargs), dims)


# ------------------------------------------------------------------ sums and losses

NEUTRAL = {
    "sum": 0.0, "mean": 0.0, "amax": -math.inf, "amin": math.inf, "any": 0.0, "all": 1.0, "logsumexp": -math.inf,
    "count_nonzero": 0.0, "prod": 1.0,
}  # fmt: skip
"""Reductions, and what changes none of them."""


def _reduction(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    x, name, value = args[0], aten_rules.name_of(target), node.meta["val"]
    if not isinstance(x, Padded) or not isinstance(value, torch.Tensor):
        return NotImplemented
    arg = aten_rules.bind_arguments(target, args, kwargs)
    over = aten_rules.dimensions(arg, x.ndim) or list(range(x.ndim))
    fill = NEUTRAL[name]
    if not x.is_floating_point() and math.isinf(fill):
        return NotImplemented
    padded = [d for d in x.padded_dims if d in over]
    stored = masked(x, fill, padded) if padded else x.stored
    result = called(target, (stored, *args[1:]), kwargs)
    if name == "mean" and padded:
        more = math.prod(stored_size(x.dims[d]) for d in padded) / math.prod(x.shape[d] for d in padded)
        result = operators.sum_partials(result) * more
    kept = [plain(1) if d in over else axes for d, axes in enumerate(x.dims) if arg.get("keepdim") or d not in over]
    return wrap(result, kept)


def _softmax(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Along a padded dimension nothing is likely there."""
    x = args[0]
    dim = argument(node, "dim") % x.ndim
    if not is_padded_axes(x.dims[dim]):
        return wrap(called(target, (x.stored, *args[1:]), kwargs), x.dims)
    result = called(target, (masked(x, -math.inf, [dim]), *args[1:]), kwargs)
    only = tuple(axes if d == dim else plain(stored_size(axes)) for d, axes in enumerate(x.dims))
    return wrap(masked(Padded(result, only), 0.0), x.dims)


def _loss_by_element(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    arg = aten_rules.bind_arguments(target, args, kwargs)
    reduction = arg.pop("reduction")
    tensors = _tensors(arg)
    dims = aligned(tensors, torch.broadcast_shapes(*(t.shape for t in tensors)))
    own = {k: broadcast(v, dims) if isinstance(v, (DTensor, Padded)) else v for k, v in arg.items()}
    x = Padded(called(target, (), {**own, "reduction": losses.NONE}), tuple(dims))
    if reduction == losses.NONE:
        return wrap(x.stored, dims)
    stored = masked(x, 0.0)
    if reduction == losses.SUM:
        return stored.sum()
    return operators.sum_partials(called(aten.mean.default, (stored,), {})) * (stored.numel() / math.prod(x.shape))


def _loss_by_class(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``nll_loss`` and ``cross_entropy``: labels that are padding do not count."""
    arg = aten_rules.bind_arguments(target, args, kwargs)
    x, labels = arg["self"], arg["target"]
    if x.ndim < 2 or labels.is_floating_point() or is_padded_axes(dims_of(x)[1]):
        return NotImplemented
    own = dims_of(x)
    rows = aligned([labels, Padded(stored_of(x), (own[0], *own[2:]))], labels.shape)
    arg["target"] = _ignored(labels, rows, arg["ignore_index"])
    arg["self"] = as_stored(x, {0: rows[0], **{d + 1: a for d, a in enumerate(rows) if d}})
    if isinstance(arg.get("weight"), Padded):
        return NotImplemented
    result = called(target, (), arg)
    return wrap(result, rows) if arg["reduction"] == losses.NONE else result


def _ignored(labels: Any, rows: Sequence[Axes], ignore_index: int) -> DTensor:
    """Labels whose padding is ``ignore_index``."""
    return masked(Padded(as_stored(labels, dict(enumerate(rows))), tuple(rows)), ignore_index)


def _cross_entropy(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``mindspeed::cross_entropy`` of logits [tokens, classes]."""
    logits, labels, *rest = args
    (rows,) = aligned([labels, Padded(stored_of(logits), dims_of(logits)[:1])], labels.shape)
    classes = dims_of(logits)[1]
    stored, labels = as_stored(logits, {0: rows, 1: classes}), as_stored(labels, {0: rows})
    if is_padded_axes(classes):
        results = vocabulary.cross_entropy(stored, labels, *rest, classes=logits.shape[1], **kwargs)
    else:
        results = called(target, (stored, labels, *rest), kwargs)
    return tuple(wrap(x, [rows]) for x in results)


def _linear_cross_entropy(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``mindspeed::linear_cross_entropy`` of hidden [tokens, width] and weight [classes, width]."""
    arg = aten_rules.bind_arguments(target, args, kwargs)
    hidden, weight, bias, labels = (arg[n] for n in ("hidden", "weight", "bias", "target"))
    if any(is_padded_axes(dims_of(x)[1]) for x in (hidden, weight)):
        return NotImplemented
    (rows,) = aligned([labels, Padded(stored_of(hidden), dims_of(hidden)[:1])], labels.shape)
    classes = dims_of(weight)[0]
    arg["hidden"], arg["weight"] = as_stored(hidden, {0: rows}), as_stored(weight, {0: classes})
    arg["bias"] = None if bias is None else as_stored(bias, {0: classes})
    arg["target"] = _ignored(labels, [rows], arg["ignore_index"])
    if is_padded_axes(classes):
        result = vocabulary.linear_cross_entropy(**arg, classes=weight.shape[0])
    else:
        result = called(target, tuple(arg.values()), {})
    return wrap(result, [rows]) if result.ndim else result


# ------------------------------------------------------------------ the table


def _getitem(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    return args[0][args[1]] if isinstance(args[0], (tuple, list)) else NotImplemented


def _experts(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Experts that are padding have no rows: theirs end where those of the last one do."""
    x, weight, ends = args
    if not isinstance(weight, Padded) or isinstance(x, Padded) or weight.padded_dims != [0]:
        return NotImplemented
    ends = None if ends is None else as_stored(ends, {0: weight.dims[0]})
    return called(target, (x, weight.stored, ends), kwargs)


def _permute(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """Tokens that are padding go to experts as others do; nobody reads what comes back."""
    tokens, chosen = args
    rows, each = dims_of(tokens)[0], chosen.shape[0] // tokens.shape[0]
    every = _joined_plain((*rows, Axis(each, each)))
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
    return wrap(result, [_joined_plain((*axes, Axis(each, each))), plain(result.shape[1])])


OF_EXPERTS = (ops.grouped_matmul.default, token_dispatch.permute_tokens, token_dispatch.ends, operator.getitem)
PRODUCTS = (
    aten.linear.default, aten.mm.default, aten.matmul.default, aten.bmm.default, aten.addmm.default,
    aten.baddbmm.default,
)  # fmt: skip
LINEAR = (aten.linear.default, aten.mm.default, aten.matmul.default, aten.addmm.default)
"""Products by a weight, which is the second factor."""
PARTS = (
    aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.split_with_sizes.default, aten.split.Tensor,
    aten.chunk.default, aten.unbind.int,
)  # fmt: skip
GATHERS = (operator.getitem, ops.moe_permute.default, ops.moe_unpermute.default, *PARTS)
"""Those that get whole values also where ranks share them evenly."""
BY_ELEMENT = (
    aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.binary_cross_entropy.default, aten.kl_div.default, aten.binary_cross_entropy_with_logits.default,
    aten.poisson_nll_loss.default, aten.soft_margin_loss.default,
)  # fmt: skip
BY_CLASS = (
    aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default, aten.cross_entropy_loss.default
)  # fmt: skip
VIEWS = (*RESHAPES, *UNIT_DIMENSIONS, aten.view_as.default, aten.reshape_as.default, aten.ravel.default)
RULES: dict[Any, Callable] = {
    operator.getitem: _getitem,
    aten.dropout.default: _dropout,
    aten.embedding.default: _embedding,
    aten.cat.default: _cat,
    aten.stack.default: _cat,
    aten.expand.default: _expand,
    aten.expand_as.default: _expand,
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(op_sets.REORDERINGS, _reordering),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(PARTS, _part),
    **dict.fromkeys(BY_ELEMENT, _loss_by_element),
    **dict.fromkeys(BY_CLASS, _loss_by_class),
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int), _softmax),
    ops.cross_entropy.default: _cross_entropy,
    ops.linear_cross_entropy.default: _linear_cross_entropy,
    ops.grouped_matmul.default: _experts,
    token_dispatch.permute_tokens: _permute,
    token_dispatch.ends: lambda *_: None,
    **dict.fromkeys((ops.attention.default, aten.scaled_dot_product_attention.default), padded_attention.attention),
}
NAMED: dict[str, Callable] = dict.fromkeys(NEUTRAL, _reduction)
