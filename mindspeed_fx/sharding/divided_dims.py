"""Which dimension of a result is divided where one of an operand is, by operator: what
:mod:`mindspeed_fx.sharding.roles` asks.

A :class:`Divided` value knows the dimensions that the results of a linear layer were viewed as, and which of the
results they are, so that a split along them says at what places the layer's weight is packed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any, Container, Mapping, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import symbols, tracing
from mindspeed_fx.graph.constants import integers_of
from mindspeed_fx.graph.op_sets import is_cast, is_pointwise, order_of
from mindspeed_fx.graph.schema import argument, has_argument

aten = torch.ops.aten
RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
}  # fmt: skip
KEEPS = {
    aten.contiguous.default, aten.clone.default, aten.dropout.default, aten.detach.default, operator.getitem,
    aten.zeros_like.default, aten.ones_like.default, aten.repeat_interleave.self_int,
}  # fmt: skip
SPLITS = {aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default, aten.unbind.int}
SLICES = {aten.slice.Tensor, aten.narrow.default, aten.select.int}
ALONG = {aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten.cumsum.default}
REDUCTIONS = {
    aten.mean.dim, aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.var.correction,
    aten.linalg_vector_norm.default,
}  # fmt: skip
PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default}
FILLS = {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
"""Values of no other's elements."""
CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv3d.default}


@dataclass(frozen=True)
class Divided:
    """Which dimension of a value is divided, and the column layers that it comes from."""

    dims: tuple[int, ...]
    """What the results of the layer were viewed as, outermost first; the first is divided."""
    pieces: int
    """Of the dimension, each divided by itself: a batch of heads that was flattened has as many as the batch."""
    columns: frozenset[str]
    span: tuple[int, int] | None = None
    """Of the layer's results the first, and the one behind the last; None: results of several layers."""
    unit: int = 1
    """So many results stand behind each place of the dimension."""

    @property
    def dim(self) -> int:
        return self.dims[0]

    def at(self, *dims: int, pieces: int | None = None) -> "Divided":
        """The same results elsewhere."""
        return dataclasses.replace(self, dims=dims, pieces=self.pieces if pieces is None else pieces)


class NeedsWhole(Exception):
    """An operator cannot work on parts."""


class NeedsCuts(Exception):
    """An operator can, of a weight that is divided at these places."""

    def __init__(self, places: Sequence[int]):
        super().__init__()
        self.places = places


def divided_result(
    node: fx.Node, divided: Mapping[fx.Node, Any], whole: Container[fx.Node], cuts: Mapping[str, Sequence[int]]
) -> Any:
    """The :class:`Divided` of the result; for operators of several results along the divided dimension one of each.

    Args:
        whole: values that parameters and activations go into, so that a rank has no part of them.
        cuts: weight -> the places at which it is known to be packed.

    Raises:
        NeedsWhole: there is none; names the operator.
        NeedsCuts: there is one if the weights are packed there.
    """
    target, value = node.target, node.meta.get("val")
    first = node.args[0] if node.args else None
    if node.op == "output":
        raise NeedsWhole("its results leave the model")
    if target is aten.einsum.default:
        return _of_einsum(node, divided, whole)
    joins = target in PRODUCTS or target in (
        aten.cat.default,
        aten.slice_scatter.default,
        aten.scaled_dot_product_attention.default,
    )
    if joins or (is_pointwise(target) and isinstance(value, torch.Tensor)):
        return _of_operands(node, divided, whole)
    if is_pointwise_function(node):
        return next(divided[a] for a in node.all_input_nodes if a in divided)
    if target is aten.stack.default:
        return _of_stack(node, divided)
    if not isinstance(first, fx.Node) or first not in divided:
        raise NeedsWhole(f"{target} needs its results whole")
    source = divided[first]
    if target is operator.getitem and isinstance(source, list):
        return source[node.args[1]]
    return _of_first(node, first, source, cuts)


def _of_first(node: fx.Node, first: fx.Node, source: Divided, cuts: Mapping[str, Sequence[int]]) -> Any:
    """Of an operator whose first argument alone counts."""
    target, value = node.target, node.meta.get("val")
    before = first.meta["val"].shape if isinstance(first.meta["val"], torch.Tensor) else ()
    if target in SPLITS or target in SLICES or target is aten.index.Tensor:
        return _of_parts(node, len(before), before, source, cuts)
    if target in ALONG:
        if argument(node, "dim") % len(before) == source.dim:
            raise NeedsWhole(f"{target} along its results")
        return source
    if target in REDUCTIONS:
        return _of_reduction(node, len(before), source)
    if target in RESHAPES:
        return _of_view(before, source, value.shape, target, cuts)
    if (order := order_of(node)) is not None:
        return source.at(*(order.index(d) for d in source.dims))
    if target is aten.expand.default:
        return source.at(*(d + value.ndim - len(before) for d in source.dims))
    if target is aten.repeat_interleave.self_int and argument(node, "dim") == source.dim:
        return dataclasses.replace(source, dims=source.dims[:1], span=None)
    if target in (aten.pad.default, aten.constant_pad_nd.default):
        padded = {len(before) - 1 - i // 2 for i, n in enumerate(argument(node, "pad")) if n}
        if source.dim not in padded:
            return source
    if target in CONVOLUTIONS and source.dim == 1 and argument(node, "groups") == before[1]:
        return source
    if target in KEEPS or is_cast(target):
        return source
    raise NeedsWhole(f"{target} needs its results whole")


# ------------------------------------------------------------------ along the divided dimension


def _of_parts(
    node: fx.Node, ndim: int, before: Sequence[int], source: Divided, cuts: Mapping[str, Sequence[int]]
) -> Any:
    """Splits, slices, selections: along other dimensions the same; along this one at the edges of packed pieces."""
    target = node.target
    if target is aten.index.Tensor:
        indices = argument(node, "indices")
        at = [i for i, x in enumerate(indices) if x is not None]
        places = integers_of(indices[at[0]]) if at == [source.dim] else None
        if places is None:
            raise NeedsWhole(f"{target} needs its results whole")
        first = places[0] % before[source.dim]
        edges = [(first, first + len(places))]
    else:
        dim = argument(node, "dim") % ndim
        removed = target in (aten.select.int, aten.unbind.int)
        if dim != source.dim:
            kept = [d for d in source.dims if d != dim or not removed]
            return source.at(*(d - (removed and dim < d) for d in kept))
        if len(node.all_input_nodes) > 1:
            raise NeedsWhole(f"{target} takes results at places that data decide")
        edges = _edges(node, before[dim])
    results = _cut(source, edges, before[source.dim], cuts, target)
    if target in (aten.select.int, aten.unbind.int):
        if len(source.dims) < 2:
            raise NeedsWhole(f"{target} takes one of its results")
        inner = before[source.dims[1]]
        if source.unit % inner:
            raise NeedsWhole(f"{target} takes one of its results")
        dims = [d - (d > source.dim) for d in source.dims[1:]]
        results = [dataclasses.replace(r, dims=tuple(dims), unit=source.unit // inner) for r in results]
    return results if target in SPLITS else results[0]


def _edges(node: fx.Node, size: int) -> list[tuple[int, int]]:
    target = node.target
    if target is aten.slice.Tensor:
        start, end, _ = slice(argument(node, "start"), argument(node, "end")).indices(size)
        if argument(node, "step") not in (None, 1):
            raise NeedsWhole(f"{target} takes some of its results")
        return [(start, end)]
    if target is aten.narrow.default:
        return [(argument(node, "start") % size, argument(node, "start") % size + argument(node, "length"))]
    if target is aten.select.int:
        return [(argument(node, "index") % size, argument(node, "index") % size + 1)]
    if target is aten.unbind.int:
        return [(i, i + 1) for i in range(size)]
    sizes = [v.shape[argument(node, "dim") % v.ndim] for v in node.meta["val"]]
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends], ends))


def _cut(
    source: Divided, edges: Sequence[tuple[int, int]], size: int, cuts: Mapping[str, Sequence[int]], target: Any
) -> list[Divided]:
    if source.span is None or source.pieces != 1:
        raise NeedsWhole(f"{target} along its results")
    low = source.span[0]
    spans = [(low + a * source.unit, low + b * source.unit) for a, b in edges]
    places = {p for span in spans for p in span if p not in source.span}
    if any(places - set(cuts.get(weight, ())) for weight in source.columns):
        raise NeedsCuts(sorted(places))
    return [dataclasses.replace(source, span=span) for span in spans]


def inner_cuts(source: Divided, cuts: Mapping[str, Sequence[int]]) -> list[int]:
    """Places inside of the value at which a weight that it comes from is packed, in results from its first on."""
    if source.span is None:
        return []
    low, high = source.span
    return sorted({p - low for weight in source.columns for p in cuts.get(weight, ()) if low < p < high})


def _of_view(
    before: Sequence[int], source: Divided, after: Sequence[int], target: Any, cuts: Mapping[str, Sequence[int]]
) -> Divided:
    """Of the view the dimension that as many elements stand before as before the divided one, or a divisor of them:
    then it is divided in pieces."""
    before, after = [symbols.as_sample(n) for n in before], [symbols.as_sample(n) for n in after]
    outer = math.prod(before[: source.dim]) * source.pieces
    inside = inner_cuts(source, cuts)
    for j, size in enumerate(after):
        pieces, rest = divmod(outer, math.prod(after[:j]))
        if rest or size % pieces or size <= pieces:
            continue
        unit, uneven = divmod(source.unit * before[source.dim], size)
        if inside and (pieces != 1 or uneven or any(p % unit for p in inside)):
            break
        if pieces != 1 or uneven:
            return dataclasses.replace(source, dims=(j,), pieces=pieces, span=None)
        extent, dims = math.prod(before[d] for d in source.dims), [j]
        while math.prod(after[d] for d in dims) < extent and dims[-1] + 1 < len(after):
            dims.append(dims[-1] + 1)
        known = list(source.dims) == list(range(source.dim, source.dim + len(source.dims)))
        return dataclasses.replace(source, dims=tuple(dims) if known else (j,), pieces=1, unit=unit)
    raise NeedsWhole(f"{target} joins its results with another dimension")


# ------------------------------------------------------------------ several operands


def _of_operands(node: fx.Node, divided: Mapping[fx.Node, Any], whole: Container[fx.Node]) -> Divided:
    """The one dimension that operands have divided, counted from the last. Others have it not, or have the same value
    all along it, or one that no activation goes into (a mask, positions, parameters), of which each rank takes its
    part.

    Raises:
        NeedsWhole: one is divided along another dimension, or is whole, as the residual stream is.
    """
    ndim = node.meta["val"].ndim
    sources = {a: divided[a] for a in node.all_input_nodes if a in divided}
    if len({(s.dim + ndim - a.meta["val"].ndim, s.pieces) for a, s in sources.items()}) > 1:
        raise NeedsWhole(f"{node.target} joins values that are divided along different dimensions")
    first, source = next(iter(sources.items()))
    if node.target in PRODUCTS and len(sources) == 1 and (rows := _rows_of_product(node, first, source)) is not None:
        return rows
    shift = ndim - first.meta["val"].ndim
    dim = source.dim + shift
    if (node.target in PRODUCTS or node.target is aten.scaled_dot_product_attention.default) and dim >= ndim - 2:
        raise NeedsWhole(f"{node.target} sums over its results, or rows of them")
    if node.target in (aten.cat.default, aten.slice_scatter.default) and argument(node, "dim") % ndim == dim:
        raise NeedsWhole(f"{node.target} puts its results beside others")
    for a in node.all_input_nodes:
        value = a.meta.get("val")
        if a in divided or a not in whole or not isinstance(value, torch.Tensor):
            continue
        at = dim - ndim + value.ndim
        if at >= 0 and value.shape[at] > 1 and value.stride(at) and value.numel() > value.shape[at]:
            raise NeedsWhole(f"{node.target} joins its results with a value that is whole (the residual stream)")
    return _joined(list(sources.values()), source.at(*(d + shift for d in source.dims)))


def _rows_of_product(node: fx.Node, first: fx.Node, source: Divided) -> Divided | None:
    """Of a product of which one operand has its rows, or the other its columns, divided."""
    left = node.args.index(first) == len(node.args) - 2
    ndim, own = node.meta["val"].ndim, first.meta["val"].ndim
    if own < 2 or source.pieces != 1 or source.dim != (own - 2 if left else own - 1):
        return None
    return dataclasses.replace(source, dims=(ndim - 2 if left else ndim - 1,))


def _joined(sources: Sequence[Divided], result: Divided) -> Divided:
    """``result`` as it comes of all ``sources``: where they are not the same results, nothing can be split off."""
    columns = frozenset().union(*(s.columns for s in sources))
    if len({(s.span, s.unit) for s in sources}) > 1:
        return dataclasses.replace(result, dims=result.dims[:1], columns=columns, span=None)
    return dataclasses.replace(result, columns=columns)


def _of_stack(node: fx.Node, divided: Mapping[fx.Node, Any]) -> Divided:
    sources = [divided[a] for a in node.all_input_nodes if a in divided]
    if len(sources) < len(node.all_input_nodes) or len({(s.dims, s.pieces) for s in sources}) > 1:
        raise NeedsWhole(f"{node.target} joins values that are divided along different dimensions")
    dim = argument(node, "dim") % node.meta["val"].ndim
    return _joined(sources, sources[0].at(*(d + (d >= dim) for d in sources[0].dims)))


def _of_einsum(node: fx.Node, divided: Mapping[fx.Node, Any], whole: Container[fx.Node]) -> Divided:
    """The letter that operands have divided, where the result has it too and it is no sum."""
    operands, result = einsum_terms(node)
    letters = {term[divided[x].dim] for term, x in operands if x in divided and "." not in term}
    sources = [divided[x] for _, x in operands if x in divided]
    letter = letters.pop() if len(letters) == 1 else ""
    if not letter or letter not in result or any(letter in t for t, x in operands if x in whole and x not in divided):
        raise NeedsWhole(f"{node.target} sums over its results, or joins them with others")
    if any(s.pieces != 1 for s in sources):
        raise NeedsWhole(f"{node.target} joins values that are divided along different dimensions")
    return dataclasses.replace(_joined(sources, sources[0]), dims=(result.index(letter),))


def einsum_terms(node: fx.Node) -> tuple[list[tuple[str, fx.Node]], str]:
    """The letters of every operand with it, and those of the result."""
    terms, _, result = argument(node, "equation").replace(" ", "").partition("->")
    return list(zip(terms.split(","), argument(node, "tensors"))), result


def _of_reduction(node: fx.Node, ndim: int, source: Divided) -> Divided:
    dim = argument(node, "dim")
    over = {d % ndim for d in ([dim] if isinstance(dim, int) else dim or range(ndim))}
    if source.dim in over:
        raise NeedsWhole(f"{node.target} needs its results whole")
    if has_argument(node, "keepdim") and argument(node, "keepdim"):
        return dataclasses.replace(source, dims=source.dims[:1])
    return source.at(source.dim - sum(d < source.dim for d in over))


def is_pointwise_function(node: fx.Node) -> bool:
    """A custom function of one tensor (an activation with a gradient of its own), or a body that a scan wraps, whose
    forward is pointwise."""
    scans = tracing.is_higher_order(node.target) and str(node.target) == "wrap"
    if not scans and (not tracing.is_autograd_function(node.target) or len(node.args) != 3):
        return False
    body = getattr(node.graph.owning_module, str(node.args[0].target))
    calls = [n.target for n in body.graph.nodes if n.op == "call_function"]
    return all(is_pointwise(t) for t in calls if isinstance(t, torch._ops.OpOverload))
