"""How operators run on padded values: on what is stored, with other sizes, where padding stays padding; see
:mod:`padded`.

What may be divided along a dimension may be padded there, for each part of the result is then made of the same part of
the arguments: the operators' own rules (:mod:`mindspeed_fx.kernels.sharding`, :func:`aten_rules.strategies`) say which.
Views, products, sums, losses and attention have rules here. Without a rule an operator gets the whole, and is named.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mindspeed_fx.compat.placements import PARTIAL, Even
from mindspeed_fx.graph import op_sets
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.op_sets import IDENTITIES, is_cast
from mindspeed_fx.graph.schema import all_arguments
from mindspeed_fx.sharding.spmd import (
    aten_rules,
    draws,
    kept_whole,
    packed,
    padded_attention,
    parts,
    token_dispatch,
)
from mindspeed_fx.sharding.spmd import padded_losses as sums
from mindspeed_fx.sharding.spmd import padded_products as products
from mindspeed_fx.sharding.spmd import padded_views as views
from mindspeed_fx.sharding.spmd.experts import OwnRows
from mindspeed_fx.sharding.spmd.packed import is_packed
from mindspeed_fx.sharding.spmd.padded import (
    Called,
    Padded,
    aligned,
    as_stored,
    broadcast,
    dims_of,
    masked,
    stored_of,
    tensors_of,
    whole,
    wrap,
)
from mindspeed_fx.sharding.spmd.padded_axes import Axes, plain

aten, ops = torch.ops.aten, torch.ops.mindspeed

FINITE = frozenset(
    "add sub rsub mul neg abs silu gelu relu leaky_relu elu sigmoid tanh softplus exp sin cos square clamp clamp_min "
    "clamp_max maximum minimum where masked_fill to _to_copy clone contiguous detach alias type_as float double half "
    "bfloat16 eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not hardswish mish "
    "zeros_like ones_like full_like empty_like".split()
)
"""Elementwise operators that are finite, and have a finite gradient, at zero."""


def run(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """``node``, the call ``target(*args, **kwargs)``, some of whose arguments are padded."""
    if is_packed(args, kwargs) and target in packed.PRODUCTS:
        result = products.of_packed(called, node, target, args, kwargs)
        if result is not NotImplemented:
            return result
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


def _elementwise(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    value, tensors = node.meta.get("val"), tensors_of(args, kwargs)
    if not isinstance(value, torch.Tensor):
        return NotImplemented
    if is_cast(target) or aten_rules.name_of(target).endswith("_like"):  # others say a type alone
        if not isinstance(args[0], Padded):
            return NotImplemented
        rest = pytree.tree_map(stored_of, args[1:])
        zero = args[0].zero and is_cast(target)
        return wrap(called(target, (args[0].stored, *rest), kwargs), args[0].dims, zero)
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
    """An operator of ``gm`` that writes to a view, or in another way than element by element, to a value of the graph:
    of a padded one it may write to a copy."""
    for node in gm.graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        values = [a for a in written_nodes(node) if a.op == "call_function"]
        is_view = any(op_sets.is_view(a.target) or op_sets.may_copy(a.target) for a in values)
        if is_view or (values and not aten_rules.is_pointwise(target)):
            return node
    return None


def _dropout(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    """The numbers are those that one device draws, for the true size."""
    x, p, train = args
    if not train or p == 0:
        return x
    if p == 1:
        return wrap(x.stored * 0, x.dims)
    return wrap(x.stored * broadcast(parts.whole(draws.kept(x.stored, p, x.shape), x.stored), x.dims), x.dims)


def _stored_by(rows: Sequence[tuple[Sequence[Any], Sequence[Any]]], tensors: Sequence[Any]) -> Any:
    """(dimension -> padding for each tensor, padded dimension -> that of each result) by rules of division; None: a
    padded dimension is in none of them."""
    dims: list[dict[int, Axes]] = [{} for _ in tensors]
    results: list[tuple[int, int, Axes]] = []
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
            results += [(i, int(p), x.dims[d]) for i, p in enumerate(row[0]) if not isinstance(p, str)]
    return dims, results


def _is_plain(row: tuple[Sequence[Any], Sequence[Any]], k: int, d: int) -> bool:
    """Whether a rule divides dimension ``d`` of tensor ``k``, in parts of any size, and leaves no sum over ranks."""
    results, inputs = row
    placed = [*results, *inputs]
    return inputs[k] == d and not any(isinstance(p, Even) or p == PARTIAL for p in placed)


def _run_stored(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict, rows: Sequence[Any]) -> Any:
    tensors = tensors_of(args, kwargs)
    match = _stored_by(rows, tensors)
    if match is None:
        return NotImplemented
    dims, placed = match
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
    tensors = tensors_of(args, kwargs)
    if not tensors:
        return NotImplemented
    count = 1 if isinstance(node.meta["val"], torch.Tensor) else len(node.meta["val"])
    rows = [([d] * count, inputs) for d, inputs in aten_rules.strategies(target, args, kwargs, tensors)]
    return _run_stored(called, node, target, args, kwargs, rows)


def _getitem(called: Called, node: fx.Node, target: Any, args: tuple, kwargs: dict) -> Any:
    return args[0][args[1]] if isinstance(args[0], (tuple, list)) else NotImplemented


OF_EXPERTS = (ops.grouped_matmul.default, token_dispatch.permute_tokens, token_dispatch.ends, operator.getitem)

GATHERS = (operator.getitem, ops.moe_permute.default, ops.moe_unpermute.default, *views.PARTS)
"""Those that get whole values also where ranks share them evenly."""

RULES: dict[Any, Callable] = {
    operator.getitem: _getitem,
    aten.dropout.default: _dropout,
    aten.sym_size.int: lambda called, node, target, args, kwargs: args[0].shape[args[1]],
    aten.embedding.default: products.embedding,
    aten.cat.default: views.cat,
    aten.stack.default: views.cat,
    aten.expand.default: views.expand,
    aten.expand_as.default: views.expand,
    **dict.fromkeys(views.VIEWS, views.view),
    **dict.fromkeys(op_sets.REORDERINGS, views.reordering),
    **dict.fromkeys(products.PRODUCTS, products.product),
    **dict.fromkeys(views.PARTS, views.part),
    **dict.fromkeys(sums.BY_ELEMENT, sums.loss_by_element),
    **dict.fromkeys(sums.BY_CLASS, sums.loss_by_class),
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int), sums.softmax),
    ops.cross_entropy.default: sums.cross_entropy,
    ops.linear_cross_entropy.default: sums.linear_cross_entropy,
    ops.grouped_matmul.default: products.experts,
    token_dispatch.permute_tokens: products.permute,
    token_dispatch.ends: lambda *_: None,
    **dict.fromkeys((ops.attention.default, aten.scaled_dot_product_attention.default), padded_attention.attention),
}

NAMED: dict[str, Callable] = dict.fromkeys(sums.NEUTRAL, sums.reduction)
