"""Attention: ``softmax(scale * q k^T + mask) v`` becomes ``mindspeed::attention``.

Matched from the softmax outward, by meaning: scores through scales, casts, views and masks back to the product
(``matmul``, ``bmm``, ``baddbmm``), weights through casts, views and a dropout of zero on to the product with v. Repeated
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

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.kernels.attention_seeded import attention_seeded
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import heads, mask, match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.attention", "mindspeed::attention"

DROPOUT_ROWS = 256
"""Attention with dropout is left to generated code below this many rows: there it was measured as fast (128 rows 1.0 in float32, 1.4 in
bfloat16; 256 rows 0.71 and 0.96; 1024 rows 0.56 and 0.67 of its time, forward and backward on one core)."""


@dataclass
class Scores:
    """What stands before the softmax."""

    q: fx.Node
    k_transposed: fx.Node
    scale: float
    masks: list[tuple[str, fx.Node, fx.Node]] = field(default_factory=list)
    """(kind, mask, where it is applied)"""
    region: list[fx.Node] = field(default_factory=list)
    softcap: float = 0.0
    sinks: fx.Node | None = None
    causal: bool = False
    """Causal besides what ``masks`` say."""
    drop: fx.Node | None = None
    """The dropout of the weights, or the call that drops them itself."""
    p: float = 0.0

    @property
    def blocking(self) -> list[tuple[str, fx.Node, fx.Node]]:
        """The masks, without those that add zero."""
        return [given for given in self.masks if given[0] != "add" or mask.meaning(given[1]) != 0]


Emit = Callable[..., list[fx.Node]]


class Miss(Exception):
    """A near miss; the text is the reason."""


@register(NAME, stage="captured", level=1, after=("plain functions",))
def attention(gm: fx.GraphModule, context: Context) -> PassReport:
    """Composed attention and scaled_dot_product_attention become one flash operator."""
    report = PassReport(NAME)
    softmaxes = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
    generated = functools.partial(_emit, dropping=functools.partial(_emit_dropout, least=DROPOUT_ROWS if context.left_to_inductor(NAME) else 1))
    emit = {"cuda": _emit_sdpa, "npu": functools.partial(_emit, dropping=_emit_seeded)}.get(context.options.target, generated)
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
        if _with_sinks(node.args[0]) is not None and any(match.is_call(u, aten.matmul.default, aten.bmm.default) for u in node.users):
            raise Miss(f"the softmax is over dimension {node.args[1]}; attention's is over the last, the keys")
        return None, []
    root, v, after, cut, drop = _weighted_sum(node)
    if root is None:
        return None, []
    scores = _with_sinks(node.args[0])
    if scores is None:
        culprit = _culprit(node.args[0])
        if culprit is None:
            return None, []  # the softmax of something that is not a product
        raise Miss(f"the scores are more than a product of q and k with scales and masks: {culprit}")
    if (scores.sinks is not None) != cut:
        raise Miss("the attention weights lose a column that is not a sink's" if cut else "the weights of the sinks are used")
    lead = list(match.value(node).shape[:-2])
    lead = lead if len(lead) == 2 else [*lead, 1] if len(lead) == 1 else None
    if lead is None:
        raise Miss(f"the attention weights have {match.value(node).dim()} dimensions; 3 and 4 are supported")

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


def _weighted_sum(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None, list[fx.Node], bool, fx.Node | None]:
    """(product with v, v, nodes between, whether the last column is cut off, dropout) after the softmax ``node``; the product
    includes a view back to 4 dimensions."""
    n, path, drop, cut = node, [], None, False
    while True:
        users = [u for u in n.users if u.op != "output"]
        products = [u for u in users if match.is_call(u, aten.matmul.default, aten.bmm.default) and u.args[0] is n]
        if products:
            if len(n.users) > 1:
                raise Miss("the attention weights are used elsewhere in the model")
            root, v = products[0], products[0].args[1]
            user = next(iter(root.users)) if len(root.users) == 1 else None
            if match.is_call(user, *match.VIEWS) and match.value(user).dim() == 4 and match.value(user).shape[-2:] == match.value(root).shape[-2:]:
                if list(match.value(user).shape[:2]) == list(match.value(node).shape[:-2]):
                    return user, v, [*path, root, user], cut, drop
            return root, v, [*path, root], cut, drop
        following = [u for u in users if match.is_call(u, aten.to.dtype, aten.dropout.default, *match.VIEWS) or match.part(u)]
        if len(following) != 1:
            if any(_from_a_stream(u) for u in users) and _culprit(node.args[0]):
                raise Miss("dropout on the attention weights from a stream of Megatron's tracker, whose numbers no kernel draws")
            if any(match.is_call(u, aten.einsum.default) for u in users) and _culprit(node.args[0]):
                raise Miss("the product with v is an einsum; only matmul and bmm are matched")
            for u in users:
                if any(match.is_call(after, aten.matmul.default, aten.bmm.default) and after.args[0] is u for after in u.users) and _with_sinks(node.args[0]) is not None:
                    raise Miss(f"the attention weights are changed before the product with v: {u.target}")
            return None, None, [], False, None
        if len(n.users) > 1:
            raise Miss("the attention weights are used elsewhere in the model")
        n = following[0]
        if n.target is aten.dropout.default:
            if drop is not None:
                raise Miss("the attention weights are dropped twice")
            drop = n
        if (piece := match.part(n)) and match.value(n).shape != match.value(piece.source).shape:
            width, last = match.value(piece.source).shape[-1], match.value(n).dim() - 1
            if (piece.dim, piece.start, piece.step) != (last, 0, 1) or match.value(n).shape[-1] != width - 1 or cut:
                return None, None, [], False, None
            cut = True
        path.append(n)


def _from_a_stream(n: fx.Node) -> bool:
    """Dropout as the Megatron adaptor writes it: a product with noise from a named state."""
    given = [a for a in n.args if match.is_call(a, match.operator.getitem)] if match.is_call(n, aten.mul.Tensor) else []
    return any(str(g.args[0].target).startswith("mindspeed.dropout_noise") for g in given)


def _with_sinks(n: Any) -> Scores | None:
    """:func:`_scores`, where a column of one score per head may be joined and the row's maximum subtracted."""
    if match.is_call(n, aten.sub.Tensor) and not n.kwargs and match.same(_maximum_of(n.args[1]), n.args[0]):
        return _extended(_with_sinks(n.args[0]), n)  # a softmax does not change, nor does its gradient
    if match.is_call(n, aten.to.dtype):
        return _extended(_with_sinks(n.args[0]), n)
    if not match.is_call(n, aten.cat.default) or len(n.args[0]) != 2 or match.argument(n, "dim", 0) % match.value(n).dim() != match.value(n).dim() - 1:
        return _scores(n)
    scores, column = _scores(n.args[0][0]), match.uncast(n.args[0][1])
    heads_of = match.value(n).shape[1] if match.value(n).dim() == 4 else None
    column = heads.source_of(column, aten.expand.default, aten.to.dtype)
    lined_up = list(match.value(column).shape) == [1, heads_of, 1, 1]
    column = heads.source_of(column, *match.VIEWS, aten.unsqueeze.default)
    if scores is None or not lined_up or list(match.value(column).shape) != [heads_of]:
        return None
    scores.sinks = column
    return _extended(scores, n)


def _maximum_of(n: Any) -> fx.Node | None:
    """x when ``n`` is the maximum of x over its last dimension, kept."""
    if match.is_call(n, match.operator.getitem) and n.args[1] == 0 and match.is_call(n.args[0], aten.max.dim):
        n = n.args[0]
    if not match.is_call(n, aten.max.dim, aten.amax.default) or not match.argument(n, "keepdim", False):
        return None
    dim, last = match.argument(n, "dim"), match.value(n.args[0]).dim() - 1
    dims = [d % (last + 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])]
    return n.args[0] if dims == [last] else None


def _culprit(n: Any, depth: int = 12) -> str | None:
    """The operator between the softmax and a product of two activations that no rule covers; None without such a product."""
    if not depth or not isinstance(n, fx.Node) or n.op != "call_function":
        return None
    if match.is_call(n, aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default):
        return str(n.target)
    inner = next((a for a in n.all_input_nodes if match.is_float(a)), None)
    below = _culprit(inner, depth - 1)
    known = match.is_call(n, aten.to.dtype, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, *match.VIEWS, *match.ADD) or match.unscale(n)[0] is not n
    return below if known or below is None else f"{n.target} ({n.name})"


def _scores(n: Any, depth: int = 20) -> Scores | None:
    """The product q k^T behind ``n``, with the scale and masks on the way; None when there is none."""
    if depth == 0 or not isinstance(n, fx.Node) or n.op != "call_function":
        return None
    if match.is_call(n, aten.matmul.default, aten.bmm.default):
        (q, by_q), (k, by_k) = (match.unscale(match.uncast(x)) for x in n.args)
        return Scores(q, k, by_q * by_k, region=[n])
    if match.is_call(n, aten.baddbmm.default):
        alpha, beta = (match.number(match.argument(n, name, 1)) for name in ("alpha", "beta"))
        if alpha is None or beta not in (0, 1):
            return None
        return Scores(n.args[1], n.args[2], float(alpha), [("add", n.args[0], n)] if beta else [], [n])
    inner, factor = match.unscale(n)
    if match.is_call(inner, aten.tanh.default) and factor > 0:
        return _capped(_scores(inner.args[0], depth - 1), n, inner, factor)
    if inner is not n:
        scores = _scores(inner, depth - 1)
        if scores and any(kind == "add" and mask.kept(m, kind) is None for kind, m, _ in scores.masks):
            raise Miss("the scores are scaled after an additive mask")
        if scores and scores.softcap:
            raise Miss("the scores are scaled after the soft-cap")
        return _extended(scores, n, factor=factor)
    if match.is_call(n, aten.to.dtype) or (match.is_call(n, *match.VIEWS) and match.value(n).shape[-2:] == match.value(n.args[0]).shape[-2:]):
        return _extended(_scores(n.args[0], depth - 1), n)
    if match.is_call(n, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _blocks(n.args[2]):
        return _extended(_scores(n.args[0], depth - 1), n, ("drop", n.args[1]))
    if match.is_call(n, aten.where.self, aten.where.ScalarOther) and _blocks(n.args[2]):
        return _extended(_scores(n.args[1], depth - 1), n, ("keep", n.args[0]))
    if match.is_call(n, aten.where.self, aten.where.ScalarSelf) and _blocks(n.args[1]):
        return _extended(_scores(n.args[2], depth - 1), n, ("drop", n.args[0]))
    for a, b in match.operands(n, aten.add.Tensor):
        scores = _scores(a, depth - 1) if match.is_float(b) else None
        if scores is not None:
            return _extended(scores, n, ("add", b))
    return None


def _capped(scores: Scores | None, n: fx.Node, tanh: fx.Node, cap: float) -> Scores | None:
    """cap * tanh(scores), where the scores were divided by the cap."""
    if scores is None:
        return None
    if scores.softcap or scores.masks:
        raise Miss("a soft-cap after a mask or another soft-cap")
    scores.softcap, scores.scale = cap, scores.scale * cap
    return _extended(_extended(scores, tanh), n)


def _blocks(fill: Any) -> bool:
    number = match.number(fill) if match.number(fill) is not None else mask.meaning(fill)
    return isinstance(number, (int, float)) and number <= mask.BLOCKED


def _extended(scores: Scores | None, n: fx.Node, given: tuple[str, fx.Node] | None = None, factor: float = 1.0) -> Scores | None:
    if scores is not None:
        scores.region.append(n)
        scores.scale *= factor
        if given:
            scores.masks.append((*given, n))
    return scores


def _transposed(gm: fx.GraphModule, before: fx.Node, n: fx.Node) -> fx.Node:
    last = match.value(n).dim() - 1
    if match.is_call(n, aten.transpose.int) and {d % (last + 1) for d in n.args[1:]} == {last, last - 1}:
        return n.args[0]
    return match.insert(gm, before, aten.transpose.int, (n, last - 1, last))


# --------------------------------------------------------------------------- the operator


def _emit(gm: fx.GraphModule, root: fx.Node, scores: Scores, q: fx.Node, k: fx.Node, v: fx.Node, dropping: Callable[..., list[fx.Node]]) -> list[fx.Node]:
    """``mindspeed::attention`` in the place of ``root``; with dropout what ``dropping`` puts there."""
    masks = scores.blocking
    bands = [mask.kept(m, kind) for kind, m, _ in masks]
    # What the masks allow together: half a plane from one and half from another are a window.
    both = mask.together([*bands, mask.CAUSAL] if scores.causal else bands)
    whole = mask.is_causal(both) or mask.is_window(both)
    windows = [1 - b.low for b in ([both] if whole else bands) if mask.is_window(b)]
    causal = whole or scores.causal or bool(windows) or any(mask.is_causal(b) for b in bands)
    rest = [given for given, band in zip(masks, bands) if band is None or not (whole or mask.is_causal(band) or mask.is_window(band))]
    if len(rest) > 1:
        raise Miss(f"{len(rest)} masks besides the causal one")
    if rest and rest[0][0] == "add" and rest[0][1].meta["needs_grad"]:
        raise Miss("the additive mask needs a gradient, which the operator does not give")
    q, k, given = _operands(gm, root, scores, q, k, v, rest)
    window = min(windows, default=0)
    keys = match.value(k).shape[2]
    if isinstance(keys, int) and window >= keys:
        window = 0  # reaches every key
    if scores.drop is not None:
        return dropping(gm, root, scores, (q, k, v), given, causal, int(window))
    arguments = (q, k, v, given, causal, scores.scale, int(window), scores.softcap, scores.sinks)
    while len(arguments) > 6 and not arguments[-1]:
        arguments = arguments[:-1]
    both = match.insert(gm, root, torch.ops.mindspeed.attention.default, arguments)
    return _put(gm, root, scores, match.insert(gm, root, match.operator.getitem, (both, 0)))


def _emit_seeded(gm: fx.GraphModule, root: fx.Node, scores: Scores, qkv: tuple, given: fx.Node | None, causal: bool, window: int) -> list[fx.Node]:
    """``mindspeed::attention_seeded`` in the place of ``root``: the kernel draws, numbers of its own."""
    what = f"dropout of {scores.p} on the attention weights"
    if scores.softcap or scores.sinks is not None:
        raise Miss(f"{what}, with {'a soft-cap' if scores.softcap else 'sinks'}: no kernel on npu has both")
    if not 0 < scores.p < 1:
        raise Miss(f"{what}: everything is dropped")
    arguments = (*qkv, given, causal, scores.scale, window, scores.p)
    kernel, reasons = attention_seeded.choose("npu", fx.map_arg(arguments, match.value), {})
    if kernel is None:
        raise Miss(f"{what}: {'; '.join(reasons)}")
    made = match.insert(gm, root, attention_seeded.overload, arguments)
    return _without_drop(gm, root, scores, _put(gm, root, scores, match.insert(gm, root, match.operator.getitem, (made, 0))))


def _without_drop(gm: fx.GraphModule, root: fx.Node, scores: Scores, region: list[fx.Node]) -> list[fx.Node]:
    """Erases the model's dropout, which drawing makes look alive."""
    if scores.drop is not root:
        scores.drop.replace_all_uses_with(scores.drop.args[0])
    gm.graph.erase_node(scores.drop)
    return region


def _emit_dropout(gm: fx.GraphModule, root: fx.Node, scores: Scores, qkv: tuple, given: fx.Node | None, causal: bool, window: int, least: int) -> list[fx.Node]:
    """``mindspeed::attention_dropout`` in the place of ``root``, its mask drawn where the model drops."""
    (q, k, _), drop, p = (match.value(x) for x in qkv), scores.drop, scores.p
    what = f"dropout of {p} on the attention weights"
    rows, keys = q.shape[2], k.shape[2]
    if given is not None or not causal or scores.sinks is not None:
        raise Miss(f"{what}: the kernel takes causal masks, windows and soft-caps only")
    if not all(isinstance(n, int) for n in (*q.shape, rows, keys)) or rows != keys:
        raise Miss(f"{what}: the kernel takes equal and fixed sequence lengths of queries and keys only")
    if rows < least:
        raise Miss(f'{what}: generated code is as fast below {least} rows, and here are {rows}; put "{NAME}" in enable to fuse all the same')
    if not 0 < p < 1:
        raise Miss(f"{what}: everything is dropped")
    shape = [*q.shape[:2], rows, keys]
    weights = shape if drop is root else list(match.value(drop).shape)
    if drop is not root and (not match.value(drop.args[0]).is_contiguous() or match.value(drop).numel() != math.prod(shape)):
        raise Miss(f"{what}: the weights are not stored row by row, so that other numbers would be drawn")
    empty = match.insert(gm, drop, aten.empty.memory_format, (weights,), {"dtype": torch.bool, "device": q.device})
    keep = match.insert(gm, drop, aten.bernoulli.p, (empty, 1 - p))
    keep = keep if weights == shape else match.insert(gm, root, aten.reshape.default, (keep, shape))
    both = match.insert(gm, root, torch.ops.mindspeed.attention_dropout.default, (*qkv, keep, scores.scale, window, scores.softcap, p))
    return _without_drop(gm, root, scores, _put(gm, root, scores, match.insert(gm, root, match.operator.getitem, (both, 0))))


def _emit_sdpa(gm: fx.GraphModule, root: fx.Node, scores: Scores, q: fx.Node, k: fx.Node, v: fx.Node) -> list[fx.Node]:
    """``aten.scaled_dot_product_attention`` in the place of ``root``; it takes causality or one mask."""
    if scores.drop is not None:
        raise Miss(f"dropout of {scores.p} on the attention weights: scaled_dot_product_attention would draw other numbers")
    if scores.softcap or scores.sinks is not None:
        raise Miss(f"no flash kernel on cuda takes {'a soft-cap' if scores.softcap else 'sinks'}")
    masks = scores.blocking
    causal = bool(masks) and all(mask.is_causal(mask.kept(m, kind)) for kind, m, _ in masks)
    if len(masks) > 1 and not causal:
        raise Miss(f"{len(masks)} masks; scaled_dot_product_attention takes one")
    q, k, given = _operands(gm, root, scores, q, k, v, [] if causal else masks)
    if given is not None and match.value(given).dtype != torch.bool:
        given = _widened(gm, root, given, match.value(q).dtype)
    grouped = match.value(q).shape[1] != match.value(k).shape[1]
    options = {"scale": scores.scale, **({"enable_gqa": True} if grouped else {})}
    return _put(gm, root, scores, match.insert(gm, root, aten.scaled_dot_product_attention.default, (q, k, v, given, 0.0, causal), options))


def _operands(gm: fx.GraphModule, root: fx.Node, scores: Scores, q: fx.Node, k: fx.Node, v: fx.Node, masks: list) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """q, k and the mask, True or zero where attention is allowed, as an operator takes them; Miss where it is not safe."""
    kind, given, where = masks[0] if masks else ("keep", None, None)
    dtype = match.value(root).dtype
    # Matching looks through casts of q and k; one that widened them to the type of v is made again.
    q, k = (_widened(gm, root, x, dtype) for x in (q, k))
    if not all(match.value(x).dtype == dtype for x in (q, k, v)):
        raise Miss(f"q, k and v are {', '.join(str(match.value(x).dtype) for x in (q, k, v))} and the result is {dtype}")
    reason = match.unsafe([root, *scores.region], [q, k, v, given, scores.sinks])
    if reason:
        raise Miss(reason)
    if kind == "drop" and given is not None:
        given = match.insert(gm, root, aten.logical_not.default, (given,))
    if given is not None:
        given = _four_dimensional(gm, root, given, where, list(match.value(q).shape[:2]))
    return q, k, given


def _put(gm: fx.GraphModule, root: fx.Node, scores: Scores, out: fx.Node) -> list[fx.Node]:
    if list(match.value(out).shape) != list(match.value(root).shape):
        out = match.insert(gm, root, aten.reshape.default, (out, list(match.value(root).shape)))
    reason = match.substitute(gm, root, out)
    if reason:
        raise Miss(reason)
    return [*scores.region, root]


def _four_dimensional(gm: fx.GraphModule, before: fx.Node, given: fx.Node, where: fx.Node, lead: list[Any]) -> fx.Node:
    """The mask as it broadcasts to [batch, heads, q_seq, kv_seq]; ``where`` it is applied, batch and heads may be one."""
    if match.value(where).dim() == 3 and match.value(given).dim() == 3 and match.value(given).shape[0] != 1:
        return match.insert(gm, before, aten.reshape.default, (given, [*lead, *match.value(given).shape[1:]]))
    while match.value(given).dim() < 4:
        given = match.insert(gm, before, aten.unsqueeze.default, (given, 0))
    return given


def _widened(gm: fx.GraphModule, before: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    narrow = match.value(x).dtype
    return match.insert(gm, before, aten.to.dtype, (x, dtype)) if narrow != dtype and torch.promote_types(narrow, dtype) == dtype else x
