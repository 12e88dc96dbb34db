"""Attention that is spelled with ``einsum``: its two products as ``matmul`` of permuted tensors.

``einsum`` of two tensors is itself computed by permuting them and multiplying matrices, so that nothing changes but the
spelling. Labels are
read, never letters: of "ibnd,jbnd->bnij" d is summed, i and j are rows and columns, b and n are both tensors'. A label
of the first tensor alone that stays before the rows (a group of heads that share keys) repeats the other tensor.
"""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import is_transpose
from mindspeed_fx.graph.match import aten

BETWEEN = (aten.to.dtype, aten.dropout.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor, *match.RESHAPES)


def as_matmul(gm: fx.GraphModule, softmax: fx.Node) -> None:
    """Rewrite the einsums that make the scores of ``softmax`` and multiply its weights, in place; others stay."""
    scores = softmax.args[0]
    for _ in range(16):
        if (
            match.is_call(scores, aten.einsum.default)
            or not isinstance(scores, fx.Node)
            or scores.op != "call_function"
        ):
            break
        scores = next((a for a in scores.all_input_nodes if match.is_float(a)), None)
    weights, seen = softmax, []
    while len(seen) < 8:
        products = [u for u in weights.users if match.is_call(u, aten.einsum.default)]
        if products:
            if len(products) == 1:
                _product_with_v(gm, products[0], weights)
            break
        following = [u for u in weights.users if match.is_call(u, *BETWEEN) and u.args[0] is weights]
        if len(following) != 1:
            break
        seen.append(weights)
        weights = following[0]
    if match.is_call(scores, aten.einsum.default):
        _product_of_q_and_k(gm, scores)
    _weights_on_the_left(gm, softmax)


def _weights_on_the_left(gm: fx.GraphModule, weights: fx.Node) -> None:
    """``v^T @ weights^T`` (values as channels, the positions last) as the transpose of ``weights @ v``."""
    for across in [u for u in weights.users if is_transpose(u)]:
        for n in list(across.users):
            if (
                match.is_call(n, aten.matmul.default, aten.bmm.default)
                and n.args[1] is across
                and n.args[0] is not across
                and match.value(n.args[0]).dim() == match.value(across).dim()
            ):
                new = rewrite.insert(
                    gm, n, n.target, (weights, rewrite.insert(gm, n, aten.transpose.int, (n.args[0], -2, -1)))
                )
                _replace(gm, n, rewrite.insert(gm, n, aten.transpose.int, (new, -2, -1)))
        if not across.users:
            gm.graph.erase_node(across)


def described(n: fx.Node, weights: fx.Node) -> str:
    """Why the einsum ``n`` of the attention's ``weights`` was left."""
    equation, tensors = n.args[0].replace(" ", ""), list(n.args[1])
    labels, _, out = equation.partition("->")
    own = labels.split(",")[tensors.index(weights)]
    if own[-1] in out:
        return f'the attention weights are mixed by einsum("{equation}") before a product with v'
    return (
        f'the product of the weights, "{own}", with v is einsum("{equation}"); a product of matrices, [..., queries, '
        "keys] @ [..., keys, dim], is"
    )


def _labels(n: fx.Node) -> tuple[list[str], list[str], list[str], list[fx.Node]] | None:
    """(labels of the first tensor, of the second, of the result, the tensors); None for anything but a plain product of
    two.
    """
    equation, tensors = n.args[0].replace(" ", ""), list(n.args[1])
    if (
        len(tensors) != 2
        or "." in equation
        or equation.count("->") != 1
        or any(match.value(t).dtype != match.value(n).dtype for t in tensors)
    ):
        return None
    arg, out = equation.split("->")
    a, b = (list(part) for part in arg.split(","))
    if any(len(set(part)) != len(part) for part in (a, b, out)) or set(out) - set(a) - set(b):
        return None
    sizes: dict[str, object] = {}
    for labels, t in ((a, tensors[0]), (b, tensors[1])):
        for label, size in zip(labels, match.value(t).shape):
            if sizes.setdefault(label, size) != size:
                return None  # a dimension of one that is broadcast
    return a, b, list(out), tensors


def _product_of_q_and_k(gm: fx.GraphModule, n: fx.Node) -> None:
    result = _labels(n)
    if result is None or len(result[2]) < 3:
        return
    a, b, out, (q, k) = result
    if out[-1] in a:  # the columns are the keys
        a, b, q, k = b, a, k, q
    lead, row, column = out[:-2], out[-2], out[-1]
    summed = [label for label in a if label in b and label not in out]
    if (
        row in b
        or column in a
        or len(summed) != 1
        or not set(lead) <= set(a)
        or set(b) - set(lead) - {column, *summed}
        or set(a) - set(lead) - {row, *summed}
    ):
        return
    q = _permute(gm, n, q, a, [*lead, row, *summed])
    k = _repeat(gm, n, k, b, lead, [column, *summed], match.value(q).shape)
    k = rewrite.insert(gm, n, aten.transpose.int, (k, -2, -1))
    _replace(gm, n, rewrite.insert(gm, n, aten.matmul.default, (q, k)))


def _product_with_v(gm: fx.GraphModule, n: fx.Node, weights: fx.Node) -> None:
    result = _labels(n)
    if (
        result is None
        or len(match.value(weights).shape) < 3
        or weights not in result[3]
        or result[3][0] is result[3][1]
    ):
        return
    a, b, out, (p, v) = result
    if p is not weights:
        a, b, p, v = b, a, v, p
    lead, row, key = a[:-2], a[-2], a[-1]
    width = [label for label in b if label not in a]
    if (
        key not in b
        or key in out
        or row in b
        or len(width) != 1
        or set(b) - set(lead) - {key, *width}
        or set(out) != {*lead, row, *width}
    ):
        return
    v = _repeat(gm, n, v, b, lead, [key, *width], match.value(p).shape)
    new = rewrite.insert(gm, n, aten.matmul.default, (p, v))
    _replace(gm, n, _permute(gm, n, new, [*lead, row, *width], out))


def _replace(gm: fx.GraphModule, n: fx.Node, result: fx.Node) -> None:
    if rewrite.substitute(gm, n, result) is None:
        gm.graph.erase_node(n)


def _permute(gm: fx.GraphModule, before: fx.Node, x: fx.Node, labels: list[str], wanted: list[str]) -> fx.Node:
    order = [labels.index(label) for label in wanted]
    return x if order == sorted(order) else rewrite.insert(gm, before, aten.permute.default, (x, order))


def _repeat(
    gm: fx.GraphModule, before: fx.Node, x: fx.Node, labels: list[str], lead: list[str], last: list[str], shape: list
) -> fx.Node:
    """``x`` as [*lead, *last], repeated along the labels of ``lead`` that it has not; ``shape`` starts with their
    sizes.
    """
    x = _permute(gm, before, x, labels, [label for label in [*lead, *last] if label in labels])
    missing = [i for i, label in enumerate(lead) if label not in labels]
    for i in missing:
        x = rewrite.insert(gm, before, aten.unsqueeze.default, (x, i))
    return (
        rewrite.insert(gm, before, aten.expand.default, (x, [*shape[: len(lead)], *match.value(x).shape[-2:]]))
        if missing
        else x
    )
