"""How a graph spells what its parameters do: linear layers, products over experts, embeddings of tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Mapping

import torch
import torch.fx as fx

from mindspeed_fx.graph.op_sets import is_cast, order_of
from mindspeed_fx.sharding.divided_dims import einsum_terms

aten = torch.ops.aten

EXPERT_PRODUCTS = {"grouped_matmul": 1, "_grouped_mm": 1, "bmm": 1, "baddbmm": 2, "matmul": 1}
"""Products with a matrix for each expert -> the argument that holds them."""
COUNTS = {aten.cumsum.default}
"""What makes positions of what it reads."""


@dataclass(frozen=True)
class Product:
    """A linear layer, however it is spelled."""

    x: fx.Node
    weight: str
    out: int
    """The dimension of the weight that the results have."""
    inner: int
    """The dimension of the weight that is summed over."""
    x_dim: int
    """The dimension of ``x`` that is summed over."""
    result_dim: int
    """The dimension of the results that is the layer's."""
    is_matrix: bool = True
    """Whether the weight has two dimensions; a cut of results is one of its own then."""


def linear_products(node: fx.Node, parameters: Mapping[fx.Node, str]) -> list[Product]:
    """``node`` as a linear layer, with each pair of dimensions of its weight that may be divided, the likeliest first;
    [] where it is none.
    """
    if node.target is aten.einsum.default:
        return _einsum_products(node, parameters)
    if node.target is aten.linear.default:
        pairs = [(*node.args[:2], 0, -1)]
    elif node.target is aten.addmm.default:
        pairs = [(*node.args[1:3], 1, -1)]
    elif node.target in (aten.mm.default, aten.matmul.default):
        pairs = [(*node.args[:2], 1, -1), (node.args[1], node.args[0], 0, -2)]
    else:
        return []
    for x, argument, out, dim in pairs:
        weight, order = stored_parameter(argument, parameters)
        if isinstance(x, fx.Node) and weight is not None and len(order) == 2 and x.meta["val"].ndim >= -dim:
            sizes = (x.meta["val"].ndim + dim, node.meta["val"].ndim + dim)
            return [Product(x, parameters[weight], order[out], order[1 - out], *sizes)]
    return []


def _einsum_products(node: fx.Node, parameters: Mapping[fx.Node, str]) -> list[Product]:
    """Of an activation and a weight: "bsh,hnd->bsnd" is divided by heads n, else by d."""
    operands, result = einsum_terms(node)
    if len(operands) != 2 or any(len(set(term)) < len(term) or not term.isalpha() for term, _ in operands):
        return []
    for (term, argument), (x_term, x) in (operands, operands[::-1]):
        weight, order = stored_parameter(argument, parameters)
        if weight is None or len(order) < 2 or stored_parameter(x, parameters)[0] is not None:
            continue
        if set(term) & set(x_term) & set(result):
            return []  # a matrix for each
        out = [c for c in result if c in term]
        inner = [c for c in x_term if c in term]
        if not out or not inner:
            return []
        likely = [*out[-2:-1], out[-1], *out[:-2]]  # heads are beside what is in one
        return [
            Product(
                x,
                parameters[weight],
                order[term.index(c)],
                order[term.index(i)],
                x_term.index(i),
                result.index(c),
                len(order) == 2,
            )
            for c in likely
            for i in inner[:1]
        ]
    return []


def inner_dims(node: fx.Node, product: Product, parameters: Mapping[fx.Node, str]) -> dict[int, int]:
    """Dimensions of ``product.x`` that are summed over -> the weight's."""
    if node.target is not aten.einsum.default:
        return {product.x_dim: product.inner}
    operands, _ = einsum_terms(node)
    (term, argument), (x_term, _) = next(
        pair for pair in (operands, operands[::-1]) if stored_parameter(pair[0][1], parameters)[0] is not None
    )
    _, order = stored_parameter(argument, parameters)
    return {x_term.index(c): order[term.index(c)] for c in x_term if c in term}


def stored_parameter(node: object, parameters: Mapping[fx.Node, str]) -> tuple[fx.Node | None, list[int]]:
    """The parameter that ``node`` is, cast or with its dimensions in another order, and which of its dimensions each
    one is; (None, []): it is none.
    """
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return None, []
    dims = list(range(node.meta["val"].ndim))
    while node not in parameters:
        order = order_of(node)
        if order is None and not is_cast(node.target):
            return None, []
        dims = dims if order is None else [order[d] for d in dims]
        node = node.args[0]  # type: ignore[assignment]
        if not isinstance(node, fx.Node):
            return None, []
    return node, dims


def token_embeddings(nodes: Iterable[fx.Node], parameters: Mapping[fx.Node, str]) -> dict[str, int]:
    """Parameters whose rows an integer input of the model chooses, as it is -> how many rows there are. (Positions that
    are counted choose rows of another table.)
    """
    results = {}
    for n in nodes:
        if n.target is not aten.embedding.default:
            continue
        table, _ = stored_parameter(n.args[0], parameters)
        if table is not None and _is_input(n.args[1], parameters):
            results[parameters[table]] = table.meta["val"].shape[0]
    return results


def _is_input(node: object, parameters: Mapping[fx.Node, str]) -> bool:
    while isinstance(node, fx.Node):
        if node.op == "placeholder":
            return node not in parameters
        if len(node.all_input_nodes) != 1 or node.target in COUNTS:
            return False
        node = node.all_input_nodes[0]
    return False


def stacked_experts(nodes: Iterable[fx.Node], parameters: Mapping[fx.Node, str]) -> list[str]:
    """Parameters [experts, ., .] that are multiplied expert by expert, in a graph that chooses experts for tokens."""
    nodes = list(nodes)
    grouped: dict[str, int] = {}
    chosen = False
    for n in nodes:
        name = getattr(getattr(n.target, "overloadpacket", None), "__name__", "")
        chosen |= name in ("topk", "moe_permute")
        if name not in EXPERT_PRODUCTS or len(n.args) <= EXPERT_PRODUCTS[name]:
            continue
        weight, order = stored_parameter(n.args[EXPERT_PRODUCTS[name]], parameters)
        if weight is not None and len(order) == 3 and order[0] == 0:
            chosen |= "grouped" in name
            grouped[parameters[weight]] = weight.meta["val"].shape[0]
    if not chosen or not grouped:
        return []
    (count, _), *_ = Counter(grouped.values()).most_common(1)
    return [name for name, size in grouped.items() if size == count]
