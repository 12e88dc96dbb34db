"""Attention: ``softmax(scale * q k^T + mask) v`` becomes ``mindspeed::attention``.

Matched from the softmax outward, by meaning: scores through scales, casts, views and masks back to the product
(``matmul``, ``bmm``, ``baddbmm``, ``einsum``), weights through casts, views and a dropout of zero on to the product
with v. Repeated heads are followed back to the grouped ones. A mask that is causal for every size, or causal with a
sliding window, is recognized, any other stays an argument. So are soft-caps (``cap * tanh(scores / cap)``) and
attention sinks (a column of one score per head joined to the scores and cut off after the softmax).
``scaled_dot_product_attention`` itself becomes the same operator. Dropout on the weights becomes
``mindspeed::attention_dropout``, whose mask is drawn where the model drops, so that a seed gives the same numbers; on
npu ``mindspeed::attention_seeded``, whose kernel draws numbers of its own, as torch_npu's
``scaled_dot_product_attention`` does. On cuda, where torch chooses among flash kernels behind
``scaled_dot_product_attention``, composed attention becomes such a call; of a call itself a causal mask becomes the
flag, with which the kernels compute half, and repeated heads are left to kernels that take groups. Safe because the
operator computes the softmax in float32 or better; rows that are masked whole by a finite fill value such as -10000 get
the mean of the values, which the model's uniform weights make of them (``fully_masked_rows.py``).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import is_transpose
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import kv_heads
from mindspeed_fx.passes.fusion.analysis.attention_scores import Scores, culprit, with_sinks
from mindspeed_fx.passes.fusion.analysis.softmax import hiding
from mindspeed_fx.passes.fusion.emit import einsum
from mindspeed_fx.passes.fusion.emit.attention import Emit, build, emitter
from mindspeed_fx.passes.fusion.emit.attention_operands import cast

NAME, OPERATOR = "fusion.attention", "mindspeed::attention"
CONTRACTIONS = (
    aten.matmul.default,
    aten.bmm.default,
    aten.einsum.default,
    aten.tensordot.default,
    aten.sum.dim_IntList,
)
NOT = (aten.logical_not.default, aten.bitwise_not.default)


@register(NAME)
def attention(gm: fx.GraphModule, context: Context) -> PassReport:
    """Composed attention and scaled_dot_product_attention become one flash operator."""
    report = PassReport(NAME)
    softmaxes = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
    emit = emitter(NAME, context, report.notes)

    def fuse(node: fx.Node) -> Outcome:
        if node.target is not aten.scaled_dot_product_attention.default:
            root, region = _from_softmax(gm, node, emit)
        else:
            root, region = _from_sdpa(gm, node, emit)
        return None if root is None else site(OPERATOR, root, region)

    rewrite_each(report, OPERATOR, calls(gm, aten.scaled_dot_product_attention.default, *softmaxes), fuse)
    rewrite.finish(gm)
    return report


# --------------------------------------------------------------------------- scaled_dot_product_attention


def _from_sdpa(gm: fx.GraphModule, node: fx.Node, emit: Emit) -> tuple[fx.Node, list[fx.Node]]:
    q, k, v, arguments = (match.argument(node, a) for a in ("query", "key", "value", "attn_mask"))
    p = match.number(match.argument(node, "dropout_p", 0.0))
    if any(match.value(x).dim() != 4 for x in (q, k, v)):
        raise Miss("q, k and v are not 4-dimensional [batch, heads, seq, dim]")
    scale = match.argument(node, "scale")
    if scale is None and not isinstance(match.value(q).shape[-1], int):
        raise Miss("the head dimension is symbolic")
    scale = match.value(q).shape[-1] ** -0.5 if scale is None else scale
    scale = match.number(scale)
    if scale is None:
        raise Miss("the scale is not a number")
    causal, masks = bool(match.argument(node, "is_causal", False)), []
    grouped = [kv_heads.ungroup(node, x, match.value(q).shape[1]) or x for x in (k, v)]
    if match.value(grouped[0]).shape[1] == match.value(grouped[1]).shape[1]:
        k, v = grouped
    heads = [match.value(x).shape[1] for x in (k, v)]
    if heads[0] != heads[1]:
        raise Miss(f"keys have {heads[0]} heads and values {heads[1]}")
    batch, rows = match.value(q).shape[:2]
    if any(statically_known_true(match.value(x).shape[0] != batch) for x in (k, v)) or rows == 1 != heads[0]:
        raise Miss("q, k and v are broadcast")
    dtype = match.value(node).dtype  # to which autocast casts what it is given
    k, v = map(rewrite.build, (k, v))
    q, k, v = (cast(gm, node, x, dtype) for x in (q, k, v))
    if arguments is not None:
        boolean = match.value(arguments).dtype == torch.bool
        masks = [("keep", arguments, node) if boolean else ("add", cast(gm, node, arguments, dtype), node)]
    scores = Scores(q, k, float(scale), masks, [node], causal=causal, drop=node if p else None, p=float(p))
    return node, emit(gm, node, scores, q, k, v)


# --------------------------------------------------------------------------- softmax(q k^T) v


def _from_softmax(gm: fx.GraphModule, node: fx.Node, emit: Emit) -> tuple[fx.Node | None, list[fx.Node]]:
    if not match.is_float(node.args[0]):
        return None, []
    if node.args[1] % match.rank(node) != match.value(node).dim() - 1:
        if with_sinks(node.args[0]) is not None and any(
            match.is_call(u, aten.matmul.default, aten.bmm.default) for u in node.users
        ):
            raise Miss(f"the softmax is over dimension {node.args[1]}; attention's is over the last, the keys")
        return None, []
    node = einsum.as_matmul(gm, node)
    root, v, after, cut, drop, cleared = _weighted_sum(node)
    if root is None:
        return None, []
    scores = with_sinks(node.args[0])
    if scores is None:
        blamed = culprit(node.args[0])
        if blamed is None:
            return None, []  # the softmax of something that is not a product
        raise Miss(f"the scores are more than a product of q and k with scales and masks: {blamed}")
    if (scores.sinks is not None) != cut:
        raise Miss(
            "the attention weights lose a column that is not a sink's" if cut else "the weights of the sinks are used"
        )
    if cleared is not None and not any(_drops(kind, m, cleared) for kind, m, _ in scores.masks):
        raise Miss("the attention weights are set to zero elsewhere than where the scores are masked")
    build(scores)
    lead = _lead(node, scores)

    def whole(x: fx.Node) -> fx.Node:
        shape = [*lead, *match.value(x).shape[-2:]]
        return x if list(match.value(x).shape) == shape else rewrite.insert(gm, root, aten.reshape.default, (x, shape))

    scores.region += [node, *after]
    scores.cleared = cleared is not None
    scores.drop, scores.p = drop, float(drop.args[1]) if drop else 0.0
    q, k = scores.q, _skip_transpose(gm, root, scores.k_transposed)
    weights = next(n for n in after if match.is_call(n, aten.matmul.default, aten.bmm.default)).args[0]
    product = [torch.broadcast_shapes(*(match.value(x).shape[:-2] for x in pair)) for pair in ((q, k), (weights, v))]
    alone = (
        _shared(list(product[0]), *(list(match.value(x).shape[:-2]) for x in (k, v)))
        if product[0] == product[1] == match.value(node).shape[:-2]
        else None
    )
    if alone is not None:
        k, v = (
            rewrite.insert(gm, root, aten.reshape.default, (x, [lead[0], alone, *match.value(x).shape[-2:]]))
            for x in (k, v)
        )
        return root, emit(gm, root, scores, whole(_skip_expand(gm, root, q, product[0])), k, v)
    q, k, v = (whole(_skip_expand(gm, root, x, shape)) for x, shape in zip((q, k, v), (product[0], *product)))
    grouped = [kv_heads.ungroup(root, x, lead[1]) for x in (k, v)]
    if all(grouped) and match.value(grouped[0]).shape[1] == match.value(grouped[1]).shape[1]:
        k, v = map(rewrite.build, grouped)
    return root, emit(gm, root, scores, q, k, v)


def _lead(node: fx.Node, scores: Scores) -> list[Any]:
    """[batch, heads] of the softmax ``node``; where it has the two in one dimension, as a mask's place tells them apart
    (fairseq views the scores as [batch, heads, ...] for the padding alone)."""
    lead = list(match.value(node).shape[:-2]) or [1]
    if len(lead) > 1:
        return [lead[0], math.prod(lead[1:])]
    places = [list(match.value(where).shape[:-2]) for _, _, where in scores.masks]
    return next((apart for apart in places if len(apart) == 2), [*lead, 1])


def _shared(lead: list, k: list, v: list) -> Any:
    """How many heads of keys and values there are, where each serves several queries in a row, [..., kv_heads, 1 ...]
    of [..., kv_heads, group ...]; else None.
    """
    for i in range(1, len(lead)):
        if k == v == [*lead[:i], *[1] * (len(lead) - i)] and k != lead:
            return math.prod(lead[1:i])
    return None


def _skip_expand(gm: fx.GraphModule, before: fx.Node, x: fx.Node, lead: Any) -> fx.Node:
    """``x``, repeated where the product broadcasts it."""
    shape = [*lead, *match.value(x).shape[-2:]]
    return x if list(match.value(x).shape) == shape else rewrite.insert(gm, before, aten.expand.default, (x, shape))


def _drops(kind: str, m: fx.Node, cleared: tuple[str, fx.Node]) -> bool:
    """Whether the mask ``m`` hides exactly what is ``cleared``; the operator's rows without any key are zero, too."""
    other, zeros = cleared
    m, zeros = (x if match.value(x).dtype == torch.bool else _boolean(x) for x in (m, zeros))
    if kind == other:
        return match.same(m, zeros)
    return {kind, other} == {"keep", "drop"} and (
        match.is_call(zeros, *NOT)
        and match.same(zeros.args[0], m)
        or match.is_call(m, *NOT)
        and match.same(m.args[0], zeros)
    )


def _boolean(n: fx.Node) -> fx.Node:
    """The boolean tensor that ``n``, of zeros and ones, was made of."""
    while match.is_call(n, aten.to.dtype) and isinstance(n.args[0], fx.Node):
        n = n.args[0]
    return n


def _weighted_sum(
    node: fx.Node,
) -> tuple[fx.Node | None, fx.Node | None, list[fx.Node], bool, fx.Node | None, fx.Node | None]:
    """(product with v, v, nodes between, whether the last column is cut off, dropout, where weights are set to zero)
    after the softmax ``node``; the product includes a view back to 4 dimensions."""
    n, path, drop, cut, cleared = node, [], None, False, None
    while True:
        users = [u for u in n.users if u.op != "output"]
        products = [u for u in users if match.is_call(u, aten.matmul.default, aten.bmm.default) and u.args[0] is n]
        if products:
            if len(n.users) > 1:
                raise Miss(_used_elsewhere(n))
            root, v = products[0], products[0].args[1]
            user = next(iter(root.users)) if len(root.users) == 1 else None
            if (
                match.is_call(user, *match.RESHAPES)
                and match.value(user).dim() == 4
                and match.value(user).shape[-2:] == match.value(root).shape[-2:]
            ):
                if list(match.value(user).shape[:2]) == list(match.value(node).shape[:-2]):
                    return user, v, [*path, root, user], cut, drop, cleared
            return root, v, [*path, root], cut, drop, cleared
        following = [
            u
            for u in users
            if match.is_call(
                u, aten.to.dtype, aten.dropout.default, aten.clone.default, aten.contiguous.default, *match.RESHAPES
            )
            or match.part(u)
            or (cleared is None and _clears(u, n))
        ]
        if len(following) != 1:
            if any(_from_a_stream(u) for u in users) and culprit(node.args[0]):
                raise Miss(
                    "dropout on the attention weights from a stream of Megatron's tracker, whose numbers no kernel "
                    "draws"
                )
            equation = next((einsum.described(u, n) for u in users if match.is_call(u, aten.einsum.default)), None)
            if equation and culprit(node.args[0]):
                raise Miss(equation)
            if (changes := _changes(users, n)) and culprit(node.args[0]):
                raise Miss(changes)
            return None, None, [], False, None, None
        if len(n.users) > 1:
            raise Miss(_used_elsewhere(n))
        before, n = n, following[0]
        cleared = _clears(n, before) or cleared
        if n.target is aten.dropout.default:
            if drop is not None:
                raise Miss("the attention weights are dropped twice")
            drop = n
        if (piece := match.part(n)) and match.value(n).shape != match.value(piece.source).shape:
            width, last = match.value(piece.source).shape[-1], match.value(n).dim() - 1
            if (piece.dim, piece.start, piece.step) != (last, 0, 1) or match.value(n).shape[-1] != width - 1 or cut:
                return None, None, [], False, None, None
            cut = True
        path.append(n)


def _clears(u: fx.Node, n: fx.Node) -> tuple[str, fx.Node] | None:
    """("keep" | "drop", mask) when ``u`` is ``n`` with elements set to zero."""
    results = [(x, m) for x, m in hiding(u) if x is n and m is not None]
    return results[0][1] if results else None


def _changes(users: list[fx.Node], n: fx.Node) -> str | None:
    """What is done to the attention weights ``n``, where a product with values follows later."""
    for u in users:
        seen, now = {u}, [u]
        for _ in range(3):
            if any(match.is_call(x, *CONTRACTIONS) for x in now):
                how = (
                    "enter"
                    if u in now and match.is_call(u, *CONTRACTIONS)
                    else "are changed before the product with v:"
                )
                return f"the attention weights {how} {u.target}" + (
                    ", which is no product of matrices with v on the right" if how == "enter" else ""
                )
            now = [
                x
                for y in now
                for x in y.users
                if x not in seen
                and match.is_float(x)
                and not match.is_call(x, match.operator.getitem, aten.gather.default, aten.index.Tensor)
            ]
            seen.update(now)
    return None


def _used_elsewhere(n: fx.Node) -> str:
    if any(u.op == "output" for u in n.users):
        return (
            "the attention weights leave the graph: the model returns them, or a graph break follows while they "
            "are "
            "alive"
        )
    return "the attention weights are used elsewhere in the model"


def _from_a_stream(n: fx.Node) -> bool:
    """Dropout as the Megatron adaptor writes it: a product with noise from a named state."""
    arguments = (
        [a for a in n.args if match.is_call(a, match.operator.getitem)] if match.is_call(n, aten.mul.Tensor) else []
    )
    return any(str(g.args[0].target).startswith("mindspeed.dropout_noise") for g in arguments)


def _skip_transpose(gm: fx.GraphModule, before: fx.Node, n: fx.Node) -> fx.Node:
    return n.args[0] if is_transpose(n) else rewrite.insert(gm, before, aten.transpose.int, (n, -2, -1))
