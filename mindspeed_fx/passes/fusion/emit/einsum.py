"""Attention that is spelled with ``einsum``: its two products as ``matmul`` of permuted tensors.

``einsum`` of two tensors is itself computed by permuting them and multiplying matrices, so that nothing changes but the
spelling. Labels are
read, never letters: of "ibnd,jbnd->bnij" d is summed, i and j are rows and columns, b and n are both tensors'. A label
of the first tensor alone that stays before the rows (a group of heads that share keys) repeats the other tensor.
Scores whose heads stand between rows and columns ("bshd,bthd->bsht" of DeepSeek's own code) are computed with their
rows beside the columns, and what is done to them up to the product with v follows.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import is_transpose
from mindspeed_fx.graph.match import aten

BETWEEN = (aten.to.dtype, aten.dropout.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor, *match.RESHAPES)

POINTWISE = (
    *match.MUL,
    *match.DIV,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.to.dtype,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
)


def as_matmul(gm: fx.GraphModule, softmax: fx.Node) -> fx.Node:
    """Rewrite the einsums that make the scores of ``softmax`` and multiply its weights, in place; others stay. The
    softmax, which is another node where the order of its dimensions changed.
    """
    softmax = _rows_beside_columns(gm, softmax)
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
    return softmax


def _rows_beside_columns(gm: fx.GraphModule, softmax: fx.Node) -> fx.Node:
    """Scores "bsht" of q "bshd" and k "bthd" as "bhst", and so all that is done to each of them until the product with
    v; ``softmax`` itself where it is anything else.
    """
    chain = _alone_between_einsums(softmax)
    labels = _labels(chain[0]) if chain else None
    if labels is None or _labels(chain[-1]) is None:
        return softmax
    a, b, out, _ = labels
    q, k = (b, a) if out[-1] in a else (a, b)
    rows = [label for label in out[:-1] if label in q and label not in k]
    if len(rows) != 1 or rows[0] == out[-2] or out[-1] in q:
        return softmax
    row = out.index(rows[0])
    order = [i for i in range(len(out)) if i not in (row, len(out) - 1)] + [row, len(out) - 1]
    renamed = "".join(out[i] for i in order)
    new = {
        chain[0]: rewrite.insert(
            gm, chain[0], aten.einsum.default, (f"{''.join(a)},{''.join(b)}->{renamed}", list(chain[0].args[1]))
        )
    }
    for n in chain[1:-1]:
        args = [new.get(x) or _with_order(gm, n, x, order) for x in n.args]
        new[n] = rewrite.insert(gm, n, n.target, tuple(args), dict(n.kwargs))
    last, weights = chain[-1], chain[-2]
    left, result = last.args[0].replace(" ", "").split("->")
    words = [
        "".join(word[i] for i in order) if x is weights else word for word, x in zip(left.split(","), last.args[1])
    ]
    tensors = [new[weights] if x is weights else x for x in last.args[1]]
    _replace(gm, last, rewrite.insert(gm, last, aten.einsum.default, (f"{','.join(words)}->{result}", tensors)))
    for n in reversed(chain[:-1]):
        gm.graph.erase_node(n)
    return new[softmax]


def _alone_between_einsums(softmax: fx.Node) -> list[fx.Node]:
    """The einsum that makes the scores, every call on them through ``softmax``, and the einsum with v; [] where
    anything else reads one of them, or one does not act on each score by itself.
    """
    chain = [softmax]
    while not match.is_call(chain[0], aten.einsum.default):
        own = [
            x
            for x in chain[0].all_input_nodes
            if match.is_float(x) and match.is_call(x, *POINTWISE, aten.einsum.default) and _follows(x, chain[0])
        ]
        if len(own) != 1:
            return []
        chain.insert(0, own[0])
    while not match.is_call(chain[-1], aten.einsum.default):
        user = next(iter(chain[-1].users), None)
        if user is None or not match.is_call(user, aten.to.dtype, aten.einsum.default):
            return []
        if not match.is_call(user, aten.einsum.default) and not _follows(chain[-1], user):
            return []
        chain.append(user)
    return chain if all(len(n.users) == 1 for n in chain[:-1]) and not any(n.meta["mutated"] for n in chain) else []


def _follows(x: fx.Node, n: fx.Node) -> bool:
    """``n`` has the dimensions of ``x``, which it alone reads, as one of its arguments."""
    return list(x.users) == [n] and match.value(x).shape == match.value(n).shape and list(n.args).count(x) == 1


def _with_order(gm: fx.GraphModule, before: fx.Node, x: object, order: list[int]) -> object:
    """``x``, which is broadcast to the dimensions of the scores, with its dimensions in ``order``; what the model laid
    between rows and columns is left away, so that a causal mask is read as one.
    """
    if not isinstance(x, fx.Node) or not isinstance(match.value(x), torch.Tensor) or match.value(x).dim() < 2:
        return x
    count, source = len(order), x
    dims = list(range(count - match.value(x).dim(), count))
    while match.is_call(source, aten.unsqueeze.default) and not source.meta["mutated"]:
        del dims[source.args[1] % match.rank(source)]
        source = source.args[0]
    if [order.index(d) for d in dims] == list(range(count - len(dims), count)):
        return source
    for _ in range(count - match.value(x).dim()):
        x = rewrite.insert(gm, before, aten.unsqueeze.default, (x, 0))
    return rewrite.insert(gm, before, aten.permute.default, (x, order))


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
