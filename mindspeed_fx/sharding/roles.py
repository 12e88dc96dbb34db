"""Which linear layers are columns and which are rows, read from the graph of a model instead of from names.

The model is captured once, without running it. Every linear layer of which no input is divided yet may be a column
layer: its results are taken to be divided, and the divided dimension is followed through pointwise operators, views,
heads and attention. A linear layer that contracts it is a row layer. What needs the dimension whole (a norm, an
addition to the residual stream, an operator without a rule here) makes whole layers of the columns that it reads, and
names itself as the reason; then the graph is read again, until no column is lost.

Roles decide what is divided, never what is computed: a wrong one costs a gather, and no value.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch
import torch.fx as fx
from torch import nn

from mindspeed_fx.capture import capture
from mindspeed_fx.compat import tracing
from mindspeed_fx.graph.op_sets import is_cast, is_pointwise, order_of
from mindspeed_fx.graph.schema import argument
from mindspeed_fx.sharding.plan import ShardingError

aten = torch.ops.aten
RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.default,
}  # fmt: skip
KEEPS = {aten.contiguous.default, aten.clone.default, aten.dropout.default, aten.detach.default, aten.expand.default}
PARTS = {aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default, aten.slice.Tensor, aten.narrow.default}


@dataclass
class Roles:
    """What each linear layer's weight is, by the parameter's name."""

    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)
    """Why a weight stays whole: the operator that is in the way."""


@dataclass(frozen=True)
class Divided:
    """The dimension of a value that is divided, and the column layers that it comes from."""

    dim: int
    columns: frozenset[str]


class _NeedsWhole(Exception):
    """An operator cannot work on parts."""


class _Seen(Exception):
    """Ends the run of the traced model before it starts."""


def read_roles(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Roles:
    """Columns and rows of ``model``, from its graph for these arguments; nothing is run.

    Args:
        model: on any device, meta included.
        args, kwargs: of the model; may be on the meta device.

    Raises:
        ShardingError: the model is no single graph.
    """
    graph, names = _captured(model, args, dict(kwargs or {}))
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    parameters = {n: name for n, name in zip(placeholders, names, strict=True) if name}
    whole: dict[str, str] = {}
    while True:
        lost, columns, rows = _follow(graph, parameters, whole)
        if not lost:
            return Roles(columns, rows, whole)
        whole.update(lost)


def _captured(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, list[str | None]]:
    """The canonical graph and, for each of its inputs, the name of the parameter that it is."""
    graphs: list[fx.GraphModule] = []
    names: list[list[str | None]] = []
    parameters = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        graphs.append(capture(gm))

        def run(*values: Any) -> Any:
            names.append([parameters.get(id(x)) for x in values])
            raise _Seen

        return run

    torch._dynamo.reset()  # a graph of this code with other sizes would make Dynamo's sizes symbols
    try:
        with torch.enable_grad(), tracing.in_one_graph(ShardingError, "parallelize"):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except _Seen:
        pass
    finally:
        torch._dynamo.reset()
    return graphs[0], names[0]


def _follow(
    graph: fx.GraphModule, parameters: Mapping[fx.Node, str], whole: Mapping[str, str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """(columns lost, with reasons; columns; rows) where the weights in ``whole`` are no columns."""
    divided: dict[fx.Node, Divided] = {}
    columns: list[str] = []
    rows: list[str] = []
    contracted: set[str] = set()
    lost: dict[str, str] = {}
    for node in graph.graph.nodes:
        product = _product(node, parameters)
        if product is not None:
            x, weight, out = product
            source = divided.get(x)
            if source is None:
                if weight not in whole and weight not in rows:
                    columns.append(weight)
                    divided[node] = Divided(out, frozenset({weight}))
            elif source.dim == x.meta["val"].ndim - 1:
                rows.append(weight)
                contracted |= source.columns
            else:
                lost.update(dict.fromkeys(source.columns, f"{node.target} reads another dimension whole"))
            continue
        sources = [divided[a] for a in node.all_input_nodes if a in divided]
        if not sources:
            continue
        joined = frozenset().union(*(s.columns for s in sources))
        try:
            dim = _result_dim(node, divided)
        except _NeedsWhole as e:
            lost.update(dict.fromkeys(joined, str(e)))
            continue
        divided[node] = Divided(dim, joined)
    for weight in columns:
        if weight not in contracted and weight not in lost:
            lost[weight] = "no linear layer contracts its results"
    return lost, list(dict.fromkeys(columns)), list(dict.fromkeys(rows))


def _product(node: fx.Node, parameters: Mapping[fx.Node, str]) -> tuple[fx.Node, str, int] | None:
    """(what is multiplied, name of the weight, dimension of the results) of a linear layer."""
    if node.target is aten.linear.default:
        x, weight = node.args[:2]
    elif node.target is aten.addmm.default:
        x, weight = node.args[1:3]
    elif node.target in (aten.mm.default, aten.matmul.default):
        x, weight = node.args[:2]
    else:
        return None
    while isinstance(weight, fx.Node) and weight not in parameters and (order_of(weight) or is_cast(weight.target)):
        weight = weight.args[0]
    if not isinstance(x, fx.Node) or weight not in parameters or weight.meta["val"].ndim != 2:
        return None
    return x, parameters[weight], node.meta["val"].ndim - 1


def _result_dim(node: fx.Node, divided: Mapping[fx.Node, Divided]) -> int:
    """The dimension of the result that is divided.

    Raises:
        _NeedsWhole: there is none; names the operator.
    """
    target = node.target
    first = node.args[0] if node.args else None
    if node.op == "output":
        raise _NeedsWhole("its results leave the model")
    if target is operator.getitem and first in divided:
        return divided[first].dim
    if target in PARTS and first in divided:
        if argument(node, "dim") % first.meta["val"].ndim == divided[first].dim:
            raise _NeedsWhole(f"{target} takes parts of its results")
        return divided[first].dim
    if target is aten.cat.default:
        return _dim_of_pieces(node, divided)
    shape = getattr(node.meta.get("val"), "shape", None)
    if shape is None or not isinstance(first, fx.Node):
        raise _NeedsWhole(f"{target} needs its results whole")
    if target is aten.scaled_dot_product_attention.default:
        return _heads(node, divided)
    if target in RESHAPES and first in divided:
        return _dim_of_view(first.meta["val"].shape, divided[first].dim, shape, target)
    if (order := order_of(node)) is not None and first in divided:
        return order.index(divided[first].dim)
    if target in KEEPS and first in divided:
        return divided[first].dim + len(shape) - first.meta["val"].ndim
    if target in (aten.softmax.int, aten._softmax.default) and first in divided:
        if node.args[1] % len(shape) != divided[first].dim:
            return divided[first].dim
    if is_pointwise(target) or is_cast(target):
        return _dim_of_all(node, divided, len(shape))
    raise _NeedsWhole(f"{target} needs its results whole")


def _dim_of_view(before: Sequence[int], dim: int, after: Sequence[int], target: Any) -> int:
    """Of the view the dimension that begins where ``dim`` begins."""
    outer = math.prod(before[:dim])
    for j, size in enumerate(after):
        if size > 1 and math.prod(after[:j]) == outer:
            return j
    raise _NeedsWhole(f"{target} joins its results with another dimension")


def _heads(node: fx.Node, divided: Mapping[fx.Node, Divided]) -> int:
    """Attention works head by head: queries, keys and values are divided by heads, or none of them."""
    if any(divided.get(a, Divided(-1, frozenset())).dim != 1 for a in node.args[:3] if isinstance(a, fx.Node)):
        raise _NeedsWhole(f"{node.target} reads queries, keys and values that are not divided by heads alike")
    return 1


def _dim_of_pieces(node: fx.Node, divided: Mapping[fx.Node, Divided]) -> int:
    """Pieces that are divided alike are put together along another dimension."""
    dims = {divided[a].dim if a in divided else None for a in node.all_input_nodes}
    dim = dims.pop()
    if dims or dim is None or argument(node, "dim") % node.meta["val"].ndim == dim:
        raise _NeedsWhole(f"{node.target} puts its results beside others")
    return dim


def _dim_of_all(node: fx.Node, divided: Mapping[fx.Node, Divided], ndim: int) -> int:
    """The one dimension that all operands of a pointwise operator have divided, or do not have, or have alone."""
    dims = {divided[a].dim + ndim - a.meta["val"].ndim for a in node.all_input_nodes if a in divided}
    if len(dims) > 1:
        raise _NeedsWhole(f"{node.target} joins values that are divided along different dimensions")
    dim = dims.pop()
    for a in node.all_input_nodes:
        value = a.meta.get("val")
        if a in divided or not isinstance(value, torch.Tensor):
            continue
        at = dim - ndim + value.ndim
        if at >= 0 and value.shape[at] > 1 and value.numel() > value.shape[at]:
            raise _NeedsWhole(f"{node.target} joins its results with a value that is whole (the residual stream)")
    return dim
