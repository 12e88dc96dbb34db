"""Attention: ``softmax(scale * q k^T + mask) v`` becomes ``mindspeed::attention``.

Matched from the softmax outward, by meaning: scores through scales, casts, views and masks back to the product
(``matmul``, ``bmm``, ``baddbmm``, ``einsum``), weights through casts, views and a dropout of zero on to the product with v. Repeated
heads are followed back to the grouped ones. A mask that is causal for every size, or causal with a sliding window, is
recognized, any other stays an argument. So are soft-caps (``cap * tanh(scores / cap)``) and attention sinks (a column of
one score per head joined to the scores and cut off after the softmax). ``scaled_dot_product_attention`` itself becomes
the same operator. Dropout on the weights becomes ``mindspeed::attention_dropout``, whose mask is drawn where the model drops, so
that a seed gives the same numbers; on npu ``mindspeed::attention_seeded``, whose kernel draws numbers of its own, as torch_npu's
``scaled_dot_product_attention`` does. On cuda, where torch chooses among flash kernels behind ``scaled_dot_product_attention``, those calls
stay and composed attention becomes one of them.
Safe because the operator computes the softmax in float32 or better; rows that are masked whole differ only where the
model used a finite fill value such as -10000.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import einsum, heads, match
from mindspeed_fx.passes.fusion.attention_emit import Emit, emitter
from mindspeed_fx.passes.fusion.match import aten
from mindspeed_fx.passes.fusion.scores import Miss, Scores, culprit, with_sinks

NAME, OPERATOR = "fusion.attention", "mindspeed::attention"
NOT = (aten.logical_not.default, aten.bitwise_not.default)


@register(NAME, stage="captured", level=1, after=("plain functions", "softmax"))
def attention(gm: fx.GraphModule, context: Context) -> PassReport:
    """Composed attention and scaled_dot_product_attention become one flash operator."""
    report = PassReport(NAME)
    softmaxes = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
    emit = emitter(NAME, context, report.notes)
    for node in calls(gm, aten.scaled_dot_product_attention.default, *softmaxes):
        try:
            if node.target is not aten.scaled_dot_product_attention.default:
                root, region = _from_softmax(gm, node, emit)
            elif context.options.target == "cuda":
                raise Miss("scaled_dot_product_attention chooses among flash kernels itself on cuda")
            else:
                root, region = _from_sdpa(gm, node, emit)
        except Miss as miss:
            report.skipped.append(skip(OPERATOR, node, str(miss)))
        else:
            if root is not None:
                report.rewrites.append(site(OPERATOR, root, region))
    match.finish(gm)
    return report


# --------------------------------------------------------------------------- scaled_dot_product_attention


def _from_sdpa(gm: fx.GraphModule, node: fx.Node, emit: Emit) -> tuple[fx.Node, list[fx.Node]]:
    q, k, v, given = (match.argument(node, a) for a in ("query", "key", "value", "attn_mask"))
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
    if given is not None:
        masks = [("keep" if match.value(given).dtype == torch.bool else "add", given, node)]
    k, v = (heads.ungroup(gm, node, x, match.value(q).shape[1]) or x for x in (k, v))
    if match.value(k).shape[1] != match.value(v).shape[1]:
        k, v = match.argument(node, "key"), match.argument(node, "value")
    return node, emit(gm, node, Scores(q, k, float(scale), masks, [node], causal=causal, drop=node if p else None, p=float(p)), q, k, v)


# --------------------------------------------------------------------------- softmax(q k^T) v


def _from_softmax(gm: fx.GraphModule, node: fx.Node, emit: Emit) -> tuple[fx.Node | None, list[fx.Node]]:
    if not match.is_float(node.args[0]):
        return None, []
    if node.args[1] % match.value(node).dim() != match.value(node).dim() - 1:
        if with_sinks(node.args[0]) is not None and any(match.is_call(u, aten.matmul.default, aten.bmm.default) for u in node.users):
            raise Miss(f"the softmax is over dimension {node.args[1]}; attention's is over the last, the keys")
        return None, []
    einsum.as_matmul(gm, node)
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
        raise Miss("the attention weights lose a column that is not a sink's" if cut else "the weights of the sinks are used")
    if cleared is not None and not any(_drops(kind, m, cleared) for kind, m, _ in scores.masks):
        raise Miss("the attention weights are set to zero elsewhere than where the scores are masked")
    lead = list(match.value(node).shape[:-2])
    if not lead:
        raise Miss("the attention weights have 2 dimensions; 3 and more are supported")
    lead = [*lead, 1] if len(lead) == 1 else [lead[0], math.prod(lead[1:])]

    def whole(x: fx.Node) -> fx.Node:
        shape = [*lead, *match.value(x).shape[-2:]]
        return x if list(match.value(x).shape) == shape else match.insert(gm, root, aten.reshape.default, (x, shape))

    scores.region += [node, *after]
    scores.drop, scores.p = drop, float(drop.args[1]) if drop else 0.0
    product, others = list(match.value(scores.q).shape[:-2]), [list(match.value(x).shape[:-2]) for x in (scores.k_transposed, v)]
    if len(product) == 2 and others == [[product[0], 1]] * 2:
        k = _transposed(gm, root, scores.k_transposed)  # multi-query: one head of keys and values for all
        return root, emit(gm, root, scores, scores.q, k, v)
    weights = next(n for n in after if match.is_call(n, aten.matmul.default, aten.bmm.default)).args[0]
    if others != [product, list(match.value(weights).shape[:-2])]:
        raise Miss("q, k and v are broadcast against each other")
    q, v = whole(scores.q), whole(v)
    k = whole(_transposed(gm, root, scores.k_transposed))
    grouped = [heads.ungroup(gm, root, x, lead[1]) for x in (k, v)]
    if all(grouped) and match.value(grouped[0]).shape[1] == match.value(grouped[1]).shape[1]:
        k, v = grouped
    return root, emit(gm, root, scores, q, k, v)


def _drops(kind: str, m: fx.Node, cleared: fx.Node) -> bool:
    """Whether the mask ``m`` hides exactly where ``cleared`` is True; the operator's rows without any key are zero, too."""
    if kind == "keep":
        return match.is_call(cleared, *NOT) and match.same(cleared.args[0], m) or match.is_call(m, *NOT) and match.same(m.args[0], cleared)
    return kind == "drop" and match.same(m, cleared)


def _weighted_sum(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None, list[fx.Node], bool, fx.Node | None, fx.Node | None]:
    """(product with v, v, nodes between, whether the last column is cut off, dropout, where weights are set to zero) after the softmax
    ``node``; the product includes a view back to 4 dimensions."""
    n, path, drop, cut, cleared = node, [], None, False, None
    while True:
        users = [u for u in n.users if u.op != "output"]
        products = [u for u in users if match.is_call(u, aten.matmul.default, aten.bmm.default) and u.args[0] is n]
        if products:
            if len(n.users) > 1:
                raise Miss(_used_elsewhere(n))
            root, v = products[0], products[0].args[1]
            user = next(iter(root.users)) if len(root.users) == 1 else None
            if match.is_call(user, *match.VIEWS) and match.value(user).dim() == 4 and match.value(user).shape[-2:] == match.value(root).shape[-2:]:
                if list(match.value(user).shape[:2]) == list(match.value(node).shape[:-2]):
                    return user, v, [*path, root, user], cut, drop, cleared
            return root, v, [*path, root], cut, drop, cleared
        following = [u for u in users if match.is_call(u, aten.to.dtype, aten.dropout.default, *match.VIEWS) or match.part(u) or (cleared is None and _clears(u, n))]
        if len(following) != 1:
            if any(_from_a_stream(u) for u in users) and culprit(node.args[0]):
                raise Miss("dropout on the attention weights from a stream of Megatron's tracker, whose numbers no kernel draws")
            if any(match.is_call(u, aten.einsum.default) for u in users) and culprit(node.args[0]):
                raise Miss("the product with v is an einsum that is no product of matrices")
            for u in users:
                if any(match.is_call(after, aten.matmul.default, aten.bmm.default) and after.args[0] is u for after in u.users) and with_sinks(node.args[0]) is not None:
                    raise Miss(f"the attention weights are changed before the product with v: {u.target}")
            return None, None, [], False, None, None
        if len(n.users) > 1:
            raise Miss(_used_elsewhere(n))
        n = following[0]
        cleared = n.args[1] if _clears(n, n.args[0]) else cleared
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


def _clears(u: fx.Node, n: fx.Node) -> bool:
    return match.is_call(u, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and u.args[0] is n and match.number(u.args[2]) == 0


def _used_elsewhere(n: fx.Node) -> str:
    if any(u.op == "output" for u in n.users):
        return "the attention weights leave the graph: the model returns them, or a graph break follows while they are alive"
    return "the attention weights are used elsewhere in the model"


def _from_a_stream(n: fx.Node) -> bool:
    """Dropout as the Megatron adaptor writes it: a product with noise from a named state."""
    given = [a for a in n.args if match.is_call(a, match.operator.getitem)] if match.is_call(n, aten.mul.Tensor) else []
    return any(str(g.args[0].target).startswith("mindspeed.dropout_noise") for g in given)


def _transposed(gm: fx.GraphModule, before: fx.Node, n: fx.Node) -> fx.Node:
    last = match.value(n).dim() - 1
    if match.is_call(n, aten.transpose.int) and {d % (last + 1) for d in n.args[1:]} == {last, last - 1}:
        return n.args[0]
    return match.insert(gm, before, aten.transpose.int, (n, last - 1, last))
