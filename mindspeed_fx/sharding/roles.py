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
from typing import Any, Callable, Container, Mapping, Sequence

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
KEEPS = {aten.contiguous.default, aten.clone.default, aten.dropout.default, aten.detach.default, operator.getitem}
PARTS = {
    aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default, aten.slice.Tensor, aten.narrow.default,
}  # fmt: skip
REMOVES = {aten.select.int, aten.unbind.int}
ALONG = {aten.softmax.int, aten._softmax.default, aten.log_softmax.int, aten.cumsum.default}
PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default}


@dataclass
class Roles:
    """What each linear layer's weight is, by the parameter's name."""

    columns: dict[str, int] = field(default_factory=dict)
    """Weight -> the dimension that the results have."""
    rows: dict[str, int] = field(default_factory=dict)
    """Weight -> the dimension that is summed over."""
    output_layers: list[str] = field(default_factory=list)
    """Weights that give a number for each row of an embedding, with no other linear layer behind them."""
    whole: dict[str, str] = field(default_factory=dict)
    """Why a weight stays whole: the operator that is in the way."""


@dataclass(frozen=True)
class Divided:
    """Which dimension of a value is divided, and the column layers that it comes from."""

    dim: int
    pieces: int
    """Of the dimension, each divided by itself: a batch of heads that was flattened has as many as the batch."""
    columns: frozenset[str]


@dataclass(frozen=True)
class Product:
    """A linear layer, however it is spelled."""

    x: fx.Node
    weight: str
    out: int
    """The dimension of the weight that the results have."""


class _NeedsWhole(Exception):
    """An operator cannot work on parts."""


class _Seen(Exception):
    """Ends the run of the traced model before it starts."""


def read_roles(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Roles:
    """Columns and rows of ``model``, from its graph for these arguments; nothing is run.

    Args:
        model: on any device, meta included.
        args, kwargs: of the model, on its device.

    Raises:
        ShardingError: the model is no single graph.
    """
    graph, names = _captured(model, args, dict(kwargs or {}))
    reader = _Reader(graph, names)
    whole: dict[str, str] = {}
    while lost := reader.read(whole):
        whole.update(lost)
    output_layers = [reader.products[n].weight for n in reader.nodes if n in reader.output_layers]
    return Roles(reader.columns, reader.rows, output_layers, whole)


def _captured(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, list[str | None]]:
    """The canonical graph and, for each of its inputs, the name of the parameter that it is."""
    graphs: list[fx.GraphModule] = []
    names: list[list[str | None]] = []
    parameters: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(id(p), name)

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


class _Reader:
    """The graph, read once for every set of weights that are no columns."""

    def __init__(self, graph: fx.GraphModule, names: Sequence[str | None]):
        self.nodes = list(graph.graph.nodes)
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        parameters = {n: name for n, name in zip(placeholders, names, strict=True) if name}
        self.products = {n: p for n in self.nodes if (p := _product(n, parameters)) is not None}
        self.learned = set(parameters) | {n for n in placeholders if _is_floating(n)}
        for n in self.nodes:
            if any(a in self.learned for a in n.all_input_nodes):
                self.learned.add(n)
        self.output_layers = self._find_output_layers()
        self.divided: dict[fx.Node, Divided] = {}
        self.columns: dict[str, int] = {}
        self.rows: dict[str, int] = {}

    def _find_output_layers(self) -> set[fx.Node]:
        """Linear layers behind which no other one stands, with as many results as an embedding has rows: these are
        divided by vocabulary, whatever comes before."""
        sizes = {n.args[0].meta["val"].shape[0] for n in self.nodes if n.target is aten.embedding.default}
        before: set[fx.Node] = set()
        results = set()
        for n in reversed(self.nodes):
            if n in self.products:
                if n not in before and n.meta["val"].shape[-1] in sizes:
                    results.add(n)
                before.add(n)
            if n in before:
                before.update(n.all_input_nodes)
        return results

    def read(self, whole: Mapping[str, str]) -> dict[str, str]:
        """Columns that are lost, with reasons, where the weights in ``whole`` are none; none lost: what was read is
        right."""
        self.divided, self.columns, self.rows = {}, {}, {}
        lost: dict[str, str] = {}
        contracted: set[str] = set()
        for node in self.nodes:
            if node in self.products:
                self._read_product(node, whole, lost, contracted)
                continue
            sources = [self.divided[a] for a in node.all_input_nodes if a in self.divided]
            if not sources:
                continue
            joined = frozenset().union(*(s.columns for s in sources))
            try:
                dim, pieces = _result_dim(node, self.divided, self.learned)
                self.divided[node] = Divided(dim, pieces, joined)
            except _NeedsWhole as e:
                lost.update(dict.fromkeys(joined, str(e)))
        for weight in self.columns:
            if weight not in contracted:
                lost.setdefault(weight, "no linear layer sums over its results")
        return lost

    def _read_product(
        self, node: fx.Node, whole: Mapping[str, str], lost: dict[str, str], contracted: set[str]
    ) -> None:
        product = self.products[node]
        source = self.divided.get(product.x)
        if source is None:
            if product.weight not in whole and product.weight not in self.rows and node not in self.output_layers:
                self.columns[product.weight] = product.out
                self.divided[node] = Divided(node.meta["val"].ndim - 1, 1, frozenset({product.weight}))
        elif node in self.output_layers:
            lost.update(dict.fromkeys(source.columns, "its results go to the output layer, which is divided by class"))
        elif (source.dim, source.pieces) == (product.x.meta["val"].ndim - 1, 1):
            self.rows[product.weight] = 1 - product.out
            contracted |= source.columns
        else:
            lost.update(dict.fromkeys(source.columns, f"{node.target} reads another dimension whole"))


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _product(node: fx.Node, parameters: Mapping[fx.Node, str]) -> Product | None:
    if node.target is aten.linear.default:
        (x, weight), out = node.args[:2], 0
    elif node.target is aten.addmm.default:
        (x, weight), out = node.args[1:3], 1
    elif node.target in (aten.mm.default, aten.matmul.default):
        (x, weight), out = node.args[:2], 1
    else:
        return None
    while isinstance(weight, fx.Node) and weight not in parameters:
        order = order_of(weight)
        if order is None and not is_cast(weight.target):
            return None
        out = out if order is None else order[out]
        weight = weight.args[0]
    if not isinstance(x, fx.Node) or weight not in parameters or weight.meta["val"].ndim != 2:
        return None
    return Product(x, parameters[weight], out)


def _result_dim(node: fx.Node, divided: Mapping[fx.Node, Divided], learned: Container[fx.Node]) -> tuple[int, int]:
    """The dimension of the result that is divided, and its pieces.

    Raises:
        _NeedsWhole: there is none; names the operator.
    """
    target = node.target
    first = node.args[0] if node.args else None
    value = node.meta.get("val")
    if node.op == "output":
        raise _NeedsWhole("its results leave the model")
    if target is aten.cat.default or target in PRODUCTS or target is aten.scaled_dot_product_attention.default:
        return _dim_of_operands(node, divided, learned)
    if is_pointwise(target) and isinstance(value, torch.Tensor):
        return _dim_of_operands(node, divided, learned)
    if _is_pointwise_function(node):
        source = next(divided[a] for a in node.all_input_nodes if a in divided)
        return source.dim, source.pieces
    if not isinstance(first, fx.Node) or first not in divided:
        raise _NeedsWhole(f"{target} needs its results whole")
    dim, pieces = divided[first].dim, divided[first].pieces
    before = first.meta["val"].ndim if isinstance(first.meta["val"], torch.Tensor) else None
    if target in PARTS or target in ALONG:
        if argument(node, "dim") % before == dim:
            raise _NeedsWhole(f"{target} along its results")
        return dim, pieces
    if target in RESHAPES:
        return _dim_of_view(first.meta["val"].shape, dim, pieces, value.shape, target)
    if (order := order_of(node)) is not None:
        return order.index(dim), pieces
    if target is aten.expand.default:
        return dim + value.ndim - before, pieces
    if target in REMOVES and argument(node, "dim") % before != dim:
        return dim - (argument(node, "dim") % before < dim), pieces
    if target in KEEPS or is_cast(target):
        return dim, pieces
    raise _NeedsWhole(f"{target} needs its results whole")


def _is_pointwise_function(node: fx.Node) -> bool:
    """A custom function of one tensor (an activation with a gradient of its own) whose forward is pointwise."""
    if not tracing.is_autograd_function(node.target) or len(node.args) != 3:
        return False
    body = getattr(node.graph.owning_module, node.args[0].target)
    calls = [n.target for n in body.graph.nodes if n.op == "call_function"]
    return all(is_pointwise(t) for t in calls if isinstance(t, torch._ops.OpOverload))


def _dim_of_view(before: Sequence[int], dim: int, pieces: int, after: Sequence[int], target: Any) -> tuple[int, int]:
    """Of the view the dimension that as many elements stand before as before the divided one, or a divisor of them:
    then it is divided in pieces."""
    outer = math.prod(before[:dim]) * pieces
    for j, size in enumerate(after):
        pieces, rest = divmod(outer, math.prod(after[:j]))
        if rest == 0 and size % pieces == 0 and size > pieces:
            return j, pieces
    raise _NeedsWhole(f"{target} joins its results with another dimension")


def _dim_of_operands(node: fx.Node, divided: Mapping[fx.Node, Divided], learned: Container[fx.Node]) -> tuple[int, int]:
    """The one dimension that operands have divided, counted from the last. Others have it not, or have the same value
    all along it, or one that no parameter goes into (a mask, positions), of which each rank takes its part.

    Raises:
        _NeedsWhole: one is divided along another dimension, or is whole, as the residual stream is.
    """
    ndim = node.meta["val"].ndim
    places = {
        (divided[a].dim + ndim - a.meta["val"].ndim, divided[a].pieces) for a in node.all_input_nodes if a in divided
    }
    if len(places) > 1:
        raise _NeedsWhole(f"{node.target} joins values that are divided along different dimensions")
    dim, pieces = places.pop()
    if (node.target in PRODUCTS or node.target is aten.scaled_dot_product_attention.default) and dim >= ndim - 2:
        raise _NeedsWhole(f"{node.target} sums over its results, or rows of them")
    if node.target is aten.cat.default and argument(node, "dim") % ndim == dim:
        raise _NeedsWhole(f"{node.target} puts its results beside others")
    for a in node.all_input_nodes:
        value = a.meta.get("val")
        if a in divided or a not in learned or not isinstance(value, torch.Tensor):
            continue
        at = dim - ndim + value.ndim
        if at >= 0 and value.shape[at] > 1 and value.stride(at) and value.numel() > value.shape[at]:
            raise _NeedsWhole(f"{node.target} joins its results with a value that is whole (the residual stream)")
    return dim, pieces
