"""Which linear layers are columns and which are rows, read from the graph of a model instead of from names.

The model is captured once, without running it. Every linear layer of which no input is divided yet may be a column
layer: its results are taken to be divided, and the divided dimension is followed through pointwise operators, views,
heads and attention. A linear layer that contracts it is a row layer. What needs the dimension whole (a norm, an
addition to the residual stream, an operator without a rule here) makes whole layers of the columns that it reads, and
names itself as the reason; then the graph is read again, until no column is lost.

Roles decide what is divided, never what is computed: a wrong one costs a gather, and no value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch
import torch.fx as fx
from torch import nn

from mindspeed_fx.capture import capture, isolate
from mindspeed_fx.compat import tracing
from mindspeed_fx.graph.functional_writes import make_writes_functional
from mindspeed_fx.graph.op_sets import is_cast, is_pointwise, order_of
from mindspeed_fx.sharding.divided_dims import (
    CONVOLUTIONS,
    FILLS,
    RESHAPES,
    Divided,
    NeedsCuts,
    NeedsWhole,
    divided_result,
    einsum_terms,
    inner_cuts,
)
from mindspeed_fx.sharding.expert_lists import kept_in_one_graph
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.products import inner_dims, linear_products, stacked_experts, token_embeddings

aten = torch.ops.aten
WITHOUT = "leave args and kwargs out: layers are told by their names then, and several graphs are taken"


@dataclass
class Roles:
    """What each linear layer's weight is, by the parameter's name."""

    columns: dict[str, int] = field(default_factory=dict)
    """Weight -> the dimension that the results have."""
    rows: dict[str, int] = field(default_factory=dict)
    """Weight -> the dimension that is summed over."""
    embeddings: list[str] = field(default_factory=list)
    """Weights whose rows the tokens choose, as many as an output layer has results."""
    experts: list[str] = field(default_factory=list)
    """Stacked weights [experts, ., .]."""
    output_layers: list[str] = field(default_factory=list)
    """Weights that give a number for each row of an embedding, with no other linear layer behind them."""
    packed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Column weight -> the sizes of what is packed in its results, where the model takes them apart."""
    companions: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    """Other parameters that divided values meet (biases, filters of channels, decays of heads) -> the dimension that
    is divided with them, and the sizes of what is packed in it."""
    whole: dict[str, str] = field(default_factory=dict)
    """Why the results of a weight are needed whole: the operator that is in the way."""


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
    while reader.read(whole):
        if not reader.choose_others():
            whole.update(reader.lost)
    output_layers = [reader.products[n].weight for n in reader.nodes if n in reader.output_layers]
    classes = {n.meta["val"].shape[-1] for n in reader.output_layers}
    embeddings = [weight for weight, rows in reader.tables.items() if rows in classes]
    experts = stacked_experts(reader.nodes, reader.parameters)
    packed = {w: sizes for w in reader.columns if len(sizes := reader.sizes_of(w)) > 1}
    whole = {w: why for w, why in whole.items() if w not in reader.rows}
    lists = {"embeddings": embeddings, "experts": experts, "output_layers": output_layers}
    return Roles(reader.columns, reader.rows, packed=packed, companions=reader.companions, whole=whole, **lists)


def _captured(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[fx.GraphModule, list[str | None]]:
    """The canonical graph and, for each of its inputs, the name of the parameter that it is."""
    graphs: list[fx.GraphModule] = []
    names: list[list[str | None]] = []
    parameters: dict[int, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        parameters.setdefault(id(p), name)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        if reason := isolate(gm):
            raise ShardingError(f"parallelize: {reason}")
        graphs.append(capture(gm))
        make_writes_functional(graphs[-1])

        def run(*values: Any) -> Any:
            names.append([parameters.get(id(x)) for x in values])
            raise _Seen

        return run

    torch._dynamo.reset()  # a graph of this code with other sizes would make Dynamo's sizes symbols
    try:
        with torch.enable_grad(), tracing.in_one_graph(ShardingError, "parallelize", WITHOUT), kept_in_one_graph(model):
            torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*args, **kwargs)
    except _Seen:
        pass
    finally:
        torch._dynamo.reset()
    return graphs[0], names[0]


class _Reader:
    """The graph, read once for every set of weights that are no columns, and of places at which others are packed."""

    def __init__(self, graph: fx.GraphModule, names: Sequence[str | None]):
        self.nodes = list(graph.graph.nodes)
        placeholders = [n for n in self.nodes if n.op == "placeholder"]
        self.parameters = {n: name for n, name in zip(placeholders, names, strict=True) if name}
        self.choices = {n: p for n in self.nodes if (p := linear_products(n, self.parameters))}
        self.products = {n: p[0] for n, p in self.choices.items()}
        self.tables = token_embeddings(self.nodes, self.parameters)
        learned = set(self.parameters) | {n for n in placeholders if _is_floating(n)}
        self.activations = {n for n in placeholders if n not in self.parameters}
        for n in self.nodes:
            if n.target in FILLS:
                continue
            learned |= {n} if any(a in learned for a in n.all_input_nodes) else set()
            self.activations |= {n} if any(a in self.activations for a in n.all_input_nodes) else set()
        self.whole_values = learned & self.activations
        self.output_layers = self._find_output_layers()
        self.cuts: dict[str, set[int]] = {}
        self.results: dict[str, int] = {}
        self._measure()
        self.begin()

    def _measure(self) -> None:
        self.results = {p.weight: n.meta["val"].shape[p.result_dim] for n, p in self.products.items()}

    def choose_others(self) -> bool:
        """Divide lost weights along another dimension, where they have one that was not tried."""
        others = {n: p[p.index(self.products[n]) + 1 :] for n, p in self.choices.items()}
        new = {n: left[0] for n, left in others.items() if left and self.products[n].weight in self.lost}
        self.products.update(new)
        for product in new.values():
            self.cuts.pop(product.weight, None)
        self._measure()
        return bool(new)

    def begin(self) -> None:
        self.divided: dict[fx.Node, Any] = {}
        self.columns: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self.companions: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.lost: dict[str, str] = {}

    def sizes_of(self, weight: str) -> tuple[int, ...]:
        """Of what is packed in the results of ``weight``."""
        edges = sorted({0, self.results[weight], *self.cuts.get(weight, ())})
        return tuple(b - a for a, b in zip(edges, edges[1:]))

    def _find_output_layers(self) -> set[fx.Node]:
        """Linear layers behind which no other one stands, with as many results as an embedding has rows: these are
        divided by vocabulary, whatever comes before."""
        sizes = set(self.tables.values())
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

    def read(self, whole: Mapping[str, str]) -> bool:
        """Whether there is more to learn: weights that are no columns (``lost``), where those in ``whole`` are none, or
        places at which columns are packed."""
        self.begin()
        contracted: set[str] = set()
        unknown: set[fx.Node] = set()  # of what comes of a lost column the next reading knows more
        again = False
        for node in self.nodes:
            if node in self.products:
                self._read_product(node, whole, contracted)
                continue
            if any(a in unknown for a in node.all_input_nodes):
                unknown.add(node)
                continue
            sources = [self.divided[a] for a in node.all_input_nodes if a in self.divided]
            if not sources or node.target in FILLS:
                continue
            joined = frozenset().union(*(s.columns for s in _flat(sources)))
            try:
                self.divided[node] = divided_result(node, self.divided, self.whole_values, self.cuts)
                self._read_companions(node)
            except NeedsWhole as e:
                unknown.add(node)
                self.lost.update(dict.fromkeys(joined, str(e)))
            except NeedsCuts as e:
                unknown.add(node)
                again = True
                for weight in joined:
                    self.cuts.setdefault(weight, set()).update(e.places)
        if not self.lost and not again:
            for weight in self.columns:
                if weight not in contracted:
                    self.lost.setdefault(weight, "no linear layer sums over its results")
        return again or bool(self.lost)

    def _read_product(self, node: fx.Node, whole: Mapping[str, str], contracted: set[str]) -> None:
        product = self.products[node]
        source, summed = self.divided.get(product.x), inner_dims(node, product, self.parameters)
        if source is None:
            if product.weight not in whole and product.weight not in self.rows and node not in self.output_layers:
                self.columns[product.weight] = product.out
                weights = frozenset({product.weight})
                span = (0, self.results[product.weight]) if product.is_matrix else None
                self.divided[node] = Divided((product.result_dim,), 1, weights, span)
        elif node in self.output_layers:
            reason = "its results go to the output layer, which is divided by class"
            self.lost.update(dict.fromkeys(source.columns, reason))
        elif source.pieces == 1 and source.dim in summed and not inner_cuts(source, self.cuts):
            self.rows[product.weight] = summed[source.dim]
            contracted |= source.columns
        else:
            self.lost.update(dict.fromkeys(source.columns, f"{node.target} reads another dimension whole"))

    def _read_companions(self, node: fx.Node) -> None:
        """Parameters that meet the divided dimension of ``node``'s result."""
        result = self.divided[node]
        if not isinstance(result, Divided) or result.pieces != 1:
            return
        value = node.meta.get("val")
        if is_pointwise(node.target) and isinstance(value, torch.Tensor):
            places = [(a, result.dim - value.ndim + a.meta["val"].ndim) for a in node.all_input_nodes]
        elif node.target in CONVOLUTIONS:
            places = [(a, 0) for a in node.args[1:3] if isinstance(a, fx.Node)]
        elif node.target is aten.einsum.default:
            operands, letters = einsum_terms(node)
            places = [(a, term.find(letters[result.dim])) for term, a in operands]
        else:
            return
        size = value.shape[result.dim]
        edges = [0, *(p // result.unit for p in inner_cuts(result, self.cuts)), size]
        sizes = tuple(b - a for a, b in zip(edges, edges[1:]))
        for a, dim in places:
            if a in self.divided or a in self.activations or dim < 0 or a.meta["val"].shape[dim] != size:
                continue
            name, at = self._parameter_of(a, dim)
            if name and name not in self.results:
                self.companions[name] = at, sizes

    def _parameter_of(self, node: fx.Node, dim: int) -> tuple[str, int]:
        """The parameter whose dimension becomes dimension ``dim`` of ``node``, and which it is; "": none is found."""
        while node not in self.parameters:
            inputs = node.all_input_nodes
            if len(inputs) != 1 or not isinstance(inputs[0].meta.get("val"), torch.Tensor):
                return "", 0
            source, size = inputs[0].meta["val"], node.meta["val"].shape[dim]
            if (order := order_of(node)) is not None:
                dim = order[dim]
            elif node.target in RESHAPES:
                same = [d for d, n in enumerate(source.shape) if n == size > 1]
                if len(same) != 1:
                    return "", 0
                dim = same[0]
            elif not (is_pointwise(node.target) or is_cast(node.target)) or source.shape != node.meta["val"].shape:
                return "", 0
            node = inputs[0]
        return self.parameters[node], dim


def _flat(values: Sequence[Any]) -> list[Divided]:
    return [d for v in values for d in (v if isinstance(v, list) else [v])]


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()
