"""What kind of operator a call is: a view, a reshape, a reordering of dimensions, a cast, pointwise.

Asked of the operator's schema and tags; a table names only what an operator does not say of itself. Whether *this* call
is a view, which for some operators depends on the layout, says :func:`mindspeed_fx.graph.storage.is_view`.
"""

from __future__ import annotations

from typing import Any, Iterable

import torch
import torch.fx as fx

from mindspeed_fx.graph import memoize
from mindspeed_fx.graph.schema import argument

aten = torch.ops.aten

TO_SHAPE = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
"""The same elements in the same order in the shape that is the second argument."""

RESHAPES = (*TO_SHAPE, aten.flatten.using_ints, aten.unflatten.int)
"""The same elements in the same order in another shape."""

UNIT_DIMENSIONS = (
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)
"""Dimensions of one element come and go."""

TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)
"""The same elements with the dimensions in another order, as captured graphs spell it."""

REORDERINGS = (
    *TRANSPOSES,
    aten.numpy_T.default,
    aten.mT.default,
    aten.adjoint.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.movedim.int,
    aten.movedim.intlist,
)
"""The same elements with the dimensions in another order (``adjoint`` of real numbers)."""

IDENTITIES = (aten.clone.default, aten.contiguous.default, aten.detach.default, aten.alias.default)
"""The same elements in the same shape and type, copied or not."""

REARRANGEMENTS = (*RESHAPES, *UNIT_DIMENSIONS, *REORDERINGS, *IDENTITIES)
"""Every element of the input once in the result, wherever it lies there."""

CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
"""The same elements in another type, or on another device; asked by :func:`is_cast`."""

OVERWRITES = (aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
"""Writes in place that do not read what they write."""

_COPY_WHERE_THEY_MUST = frozenset(
    (
        *("reshape", "reshape_as", "flatten", "ravel", "contiguous", "to", "resolve_conj", "resolve_neg", "positive"),
        *("type_as", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "sum_to_size"),
        *("broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d", "einsum"),
    )
)
"""Operators of ATen that return their input, or a view of it, where that has the layout and the type that they promise,
and a copy where not. Of half of them the schema does not say so."""

_UNSAID = frozenset((aten._unsafe_view.default,))
"""Views whose schema promises that nobody uses their input again, and calls them none."""

_POINTWISE = frozenset(
    (
        *(aten.contiguous.default, aten.detach.default, aten.alias.default, aten.copy.default),
        *(aten.masked_fill.Tensor, aten.fill.Scalar, aten.fill.Tensor),
        *(aten.dropout.default, aten.native_dropout.default),
    )
)
"""Pointwise operators that ``torch.Tag.pointwise`` leaves out."""


@memoize.by_target
def is_view(target: Any) -> bool:
    """Whether the operator computes nothing, and its results lie in the memory of its argument: always, or
    (:func:`may_copy`) where the layout allows it.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return False
    if target in _UNSAID:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in target._schema.returns)


@memoize.by_target
def may_copy(target: Any) -> bool:
    """Whether the operator returns its argument's memory for some calls and a copy for others; no schema says it."""
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == "aten"
        and name(target) in _COPY_WHERE_THEY_MUST
    )


@memoize.by_target
def may_alias(target: Any) -> bool:
    """Whether a result can lie in the memory of an argument: views, writes in place, and what is no operator."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return is_view(target) or may_copy(target) or any(r.alias_info is not None for r in target._schema.returns)


@memoize.by_target
def may_write(target: Any) -> bool:
    """Whether a call changes its arguments in place, or runs a graph, which may."""
    return (isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable) or isinstance(
        target, torch._ops.HigherOrderOperator
    )


@memoize.by_target
def is_pointwise(target: Any) -> bool:
    """Whether every element of the results is made of the same element of each argument, broadcast; also of those that
    draw (:func:`is_random`) and of those that write in place.
    """
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags
        or target in _POINTWISE
        or is_cast(target)
        or is_pointwise(functional_form(target))
    )


@memoize.by_target
def is_cast(target: Any) -> bool:
    """Whether the operator gives the same elements in another type, or on another device."""
    return target in CASTS or name(target) == "convert_element_type"


@memoize.by_target
def is_random(target: Any) -> bool:
    """Whether the operator draws random numbers, as it says itself."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers: not dropout that is off, as a flag or a probability of zero says."""
    if not is_random(node.target):
        return False
    off = any(argument(node, flag, True) is False for flag in ("train", "training"))
    return not off and argument(node, "dropout_p", 1.0) != 0 and argument(node, "p", 1.0) != 0


def name(target: Any) -> str:
    """ "add" of ``aten.add.Tensor``: an operator without its namespace and its overload."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return str(getattr(target, "__name__", target))


def is_residual_sum(node: fx.Node) -> bool:
    """Whether ``node`` is the sum of a fused sum and norm, which goes on as the residual stream."""
    if node.op != "call_function" or node.args[1:2] != (1,) or not isinstance(node.args[0], fx.Node):
        return False
    return name(node.args[0].target) in ("add_rms_norm", "add_layer_norm")


def names(targets: Iterable[Any]) -> frozenset[str]:
    """The names of a table of operators, for those who ask by name."""
    return frozenset(map(name, targets))


@memoize.by_target
def functional_form(target: torch._ops.OpOverload) -> Any:
    """``aten.mul.Tensor`` of ``aten.mul_.Tensor``; None of what has no such form, or is one."""
    if not name(target).endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name(target).removesuffix("_"), None)
    return getattr(packet, target._overloadname or "default", None)


def order_of(node: fx.Node) -> list[int] | None:
    """Which dimension of the input each of the result is, for :data:`REORDERINGS`; None of others."""
    if node.op != "call_function" or node.target not in REORDERINGS:
        return None
    dims = node.meta["val"].dim()
    order = list(range(dims))
    if node.target is aten.permute.default:
        return [d % dims for d in node.args[1]]
    if node.target in (aten.t.default, aten.numpy_T.default):
        return order[::-1]
    if node.target in (aten.mT.default, aten.adjoint.default):
        return [*order[:-2], *order[:-3:-1]]
    first, second = node.args[1:3]
    if node.target in (aten.movedim.int, aten.movedim.intlist):
        return _moved(dims, first, second)
    if dims:
        order[first % dims], order[second % dims] = order[second % dims], order[first % dims]
    return order


def _moved(dims: int, source: Any, destination: Any) -> list[int]:
    sources, places = ([d % dims for d in ([v] if isinstance(v, int) else v)] for v in (source, destination))
    rest = iter(d for d in range(dims) if d not in sources)
    at = dict(zip(places, sources))
    return [at[i] if i in at else next(rest) for i in range(dims)]
