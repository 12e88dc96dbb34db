"""Products with one-hot masks become gathers and scatters of rows.

GShard's dispatch ``einsum("sec,sm->ecm", mask, x)`` puts each token at a place of an expert, and its combine
``einsum("sec,ecm->sm", weights, y)`` takes it back from there, both as products with a tensor [tokens, experts,
capacity] that is zero but for one or two places per token. Where the mask can be read as such
(:mod:`mindspeed_fx.passes.fusion.analysis.one_hot`) the rows are added at their places and read from them; gradients
reach the weights, the tokens and the experts. Token dimensions may be groups and tokens; the product may be an
``einsum`` in any order of letters, or a matrix product with the mask viewed as a matrix, as
DeepSpeed writes both. Cost: tokens x hidden elements moved instead of tokens x experts x capacity x hidden multiplied.
Source: MindSpeed's token rearrangement; Lepikhin et al. 2020, "GShard".
"""

from __future__ import annotations

import math
from typing import Iterator

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import strip_transpose
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis.one_hot import Reader, Sparse, parse_einsum

NAME = "fusion.one_hot_dispatch"
DISPATCH, COMBINE = "rows added at their places", "rows read from their places"


@register(NAME)
def one_hot_dispatch(gm: fx.GraphModule, context: Context) -> PassReport:
    """Products with one-hot dispatch and combine tensors become scatters and gathers of rows."""
    report = PassReport(NAME)
    products = calls(gm, aten.einsum.default, aten.matmul.default, aten.mm.default)
    rewrite_each(report, "gather and scatter", products, _fuse)
    rewrite.finish(gm)
    return report


def _fuse(node: fx.Node) -> Outcome:
    unread = None
    for letters, weights, other, result in _roles(node):
        reader = Reader(node)
        sparse = reader.of(weights)
        if sparse is None or any(p is None for t in sparse.terms for p in t.places):
            unread = weights if _has_one_hot(weights) else unread
            continue
        combines = bool(set(letters[0][sparse.tokens :]) & set(letters[1]))
        return (
            match.unsafe([node, *reader.region], [other])
            or _rewrite(reader, node, sparse, letters, weights, other, result)
            or site(COMBINE if combines else DISPATCH, node, [node])
        )
    if unread is None:
        return None
    return f"{unread.name} is made of one-hot vectors, but not as products, weights and sums of them that are read"


def _roles(node: fx.Node) -> Iterator[tuple[tuple[str, str], fx.Node, fx.Node, str]]:
    """((letters of the weights, letters of the rows), weights, rows, letters of the result) for each operand that may
    move the other's rows.
    """
    if node.target != aten.einsum.default:
        yield from _matrix_product(node)
        return
    words = parse_einsum(node)
    if words is None or len(words[0]) != 2 or len(node.args[1]) != 2:
        return
    for i in (0, 1):
        w, x, result = words[0][i], words[0][1 - i], words[1]
        if (
            len(w) >= 3
            and len(set(x) - set(w)) == 1
            and set(result) <= set(w) | set(x)
            and match.is_float(node.args[1][1 - i])
        ):
            yield (w, x), node.args[1][i], node.args[1][1 - i], result


def _matrix_product(node: fx.Node) -> Iterator[tuple[tuple[str, str], fx.Node, fx.Node, str]]:
    """The same for ``view(weights, [a, b]) @ rows`` and ``view(weights, [a, b]).t() @ rows``. The letters of what the
    view joined are those of the weights' dimensions; rows and result have them joined, and ``_rewrite`` takes them
    apart."""
    matrix, rows = node.args
    if match.value(matrix).dim() != 2 or match.value(rows).dim() != 2 or not match.is_float(rows):
        return
    matrix, turned = strip_transpose(matrix)
    if not match.is_call(matrix, *match.RESHAPES):
        return
    weights = matrix.args[0]
    shape, width = match.value(weights).shape, match.value(matrix).shape[1]
    count = next(
        (k for k in range(1, len(shape)) if symbols.statically_known_true(math.prod(shape[k:]) == width)), None
    )
    if len(shape) < 3 or count is None:
        return
    letters = "abcdefgh"[: len(shape)]
    inner, outer = (letters[:count], letters[count:]) if turned else (letters[count:], letters[:count])
    yield (letters, inner + "z"), weights, rows, outer + "z"


def _rewrite(
    r: Reader, node: fx.Node, sparse: Sparse, letters: tuple[str, str], weights: fx.Node, rows: fx.Node, result: str
) -> str | None:
    w, x = letters
    (hidden,) = set(x) - set(w)
    tokens, places = w[: sparse.tokens], w[sparse.tokens :]
    if node.target != aten.einsum.default:
        rows = r.make(
            aten.reshape.default,
            rows,
            [*(match.value(weights).shape[w.index(letter)] for letter in x[:-1]), match.value(rows).shape[-1]],
        )
    size = {letter: n for word, t in ((w, weights), (x, rows)) for letter, n in zip(word, match.value(t).shape)}
    dispatching = set(x) == {*tokens, hidden}
    groups = [t for t in tokens if t in (result if dispatching else x)]
    if (
        not dispatching
        and set(x) != {*groups, *places, hidden}
        or set(result) != ({*groups, *places, hidden} if dispatching else {*tokens, hidden})
    ):
        return f"{_bind_labels(node)} is neither a dispatch of rows nor a combination"
    if groups != list(tokens[: len(groups)]) or len(groups) >= len(tokens) or len(groups) > 1:
        return f"{_bind_labels(node)}: tokens may have one dimension of groups before the one that moves"
    index, weight = r.stacked(sparse)
    flat = index[0]
    for letter, place in zip(places[1:], index[1:]):
        flat = r.make(aten.add.Tensor, r.make(aten.mul.Tensor, flat, size[letter]), place)
    count = 1
    for letter in places:
        count = count * size[letter]
    for g in reversed(groups):
        # The places of one group after those of another.
        shape = [size[g] if t == g else 1 for t in tokens] + [1]
        number = r.make(
            aten.reshape.default, r.make(aten.arange.default, size[g], device=match.value(flat).device), shape
        )
        flat = r.make(aten.add.Tensor, flat, r.make(aten.mul.Tensor, number, count))
        count = count * size[g]
    flat = r.make(aten.reshape.default, flat, [-1])
    dtype = match.value(node).dtype
    if weight is not None:
        weight = r.make(aten.unsqueeze.default, weight, -1)
    if dispatching:
        rows = _order_labels(r, rows, x, [*tokens, hidden])
        rows = r.make(aten.unsqueeze.default, rows, -2)
        choices = match.value(index[0]).shape[-1]
        rows = (
            r.make(aten.mul.Tensor, rows, weight)
            if weight is not None
            else r.make(aten.expand.default, rows, [*(size[t] for t in tokens), choices, size[hidden]])
        )
        rows = r.make(aten.reshape.default, rows, [-1, size[hidden]])
        rows = rows if match.value(rows).dtype == dtype else r.make(aten.to.dtype, rows, dtype)
        empty = r.make(aten.zeros.default, [count, size[hidden]], dtype=dtype, device=match.value(rows).device)
        order = [*groups, *places, hidden]
        out = r.make(aten.index_add.default, empty, 0, flat, rows)
    else:
        rows = _order_labels(r, rows, x, [*groups, *places, hidden])
        rows = r.make(aten.index_select.default, r.make(aten.reshape.default, rows, [-1, size[hidden]]), 0, flat)
        rows = r.make(aten.reshape.default, rows, [*match.value(index[0]).shape, size[hidden]])
        wide = accumulation_dtype(dtype)
        if weight is not None:
            rows, weight = (
                t if match.value(t).dtype == wide else r.make(aten.to.dtype, t, wide) for t in (rows, weight)
            )
            rows = r.make(aten.mul.Tensor, rows, weight)
        out = r.make(aten.sum.dim_IntList, rows, [-2])
        out = out if match.value(out).dtype == dtype else r.make(aten.to.dtype, out, dtype)
        order = [*tokens, hidden]
    out = r.make(aten.reshape.default, out, [size[letter] for letter in order])
    out = _order_labels(r, out, "".join(order), list(result))
    if node.target != aten.einsum.default:
        out = r.make(aten.reshape.default, out, list(match.value(node).shape))
    return rewrite.substitute(node.graph.owning_module, node, rewrite.build(out))


def _bind_labels(node: fx.Node) -> str:
    return f"einsum {node.args[0]!r}" if node.target == aten.einsum.default else f"the matrix product {node.name}"


def _order_labels(r: Reader, x: fx.Node, letters: str, wanted: list[str]) -> fx.Node:
    order = [letters.index(letter) for letter in wanted]
    return x if order == list(range(len(order))) else r.make(aten.permute.default, x, order)


def _has_one_hot(n: fx.Node, depth: int = 8) -> bool:
    if not depth or not isinstance(n, fx.Node) or n.op != "call_function":
        return False
    return n.target is aten.one_hot.default or any(_has_one_hot(a, depth - 1) for a in n.all_input_nodes)
