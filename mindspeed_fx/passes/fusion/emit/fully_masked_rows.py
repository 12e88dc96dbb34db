"""Rows of an attention that its masks hide whole, where the model sets hidden scores to a number such as -10000 instead
of minus infinity.

All scores of such a row are that number, so the model's weights are uniform and the row is the mean of the values; the
operator, which knows no number, would make it zero. Padding to the left under a causal mask makes such rows. Only the
label of the first token after it reads one of them as a rule, but they are the model's result all the same.

With two numbers the keys of the higher one have the weight. Where padding alone hides a row's own key that is noted;
where another mask does, it is meant (a token of Reformer sees itself where it sees no other), and the attention is
left.
"""

from __future__ import annotations

import math
from typing import Callable

import torch.fx as fx

from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.op_sets import is_pointwise, is_random
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis import mask, positions
from mindspeed_fx.passes.fusion.analysis.attention_scores import Scores
from mindspeed_fx.passes.fusion.analysis.bands import BLOCKED, Distance


def refuse_meant(scores: Scores) -> None:
    """Miss where a mask that is no padding may hide a row's own key, and the masks hide by different amounts."""
    masks = scores.blocking
    if scores.sinks is not None or scores.cleared or len(masks) < 2:
        return
    hiding = {masked: amount for masked in masks if (amount := _amount(*masked)) is not None}
    numbers = sorted(set(hiding.values()))
    meant = [m for kind, m, where in hiding if not (mask.keeps_own_key(kind, m, where) or _alike_for_queries(m))]
    if meant and (len(numbers) > 1 or any(kind == "add" for kind, *_ in hiding)):
        told = " and ".join(f"{n:g}" for n in numbers)
        raise Miss(
            f"the masks set hidden scores to {told}, and one of them ({meant[0].name}) may hide a query's own key: "
            "a row that they hide whole has weights of its own"
        )


def some_left(
    gm: fx.GraphModule, root: fx.Node, scores: Scores, shaped: Callable[[fx.Node, fx.Node], fx.Node], notes: list[str]
) -> fx.Node | None:
    """True for the rows, [batch or 1, heads or 1, queries or 1, 1], that keep a key; None where no row needs the mean.
    ``shaped(mask, where it is applied)`` is four-dimensional. ``notes`` gets what is said of rows whose weights are not
    uniform: they are zero. What is added before the number is set changes nothing in a row that is hidden whole."""
    if scores.sinks is not None or scores.cleared:  # all of the weight is the sink's, or set to zero
        return None
    masks = scores.blocking
    fills = {_fill(where) for kind, _, where in masks if kind != "add"}
    if fills <= {-math.inf} or _own_key(scores):
        return None
    first = next(i for i, (kind, *_) in enumerate(masks) if kind != "add")
    added = [(i, m) for i, (kind, m, _) in enumerate(masks) if kind == "add"]
    if len(fills) > 1 or any(i > first for i, _ in added):
        both = " and ".join(sorted(map(str, fills)))
        notes.append(
            "rows that the masks hide whole become zero: the model sets hidden scores to "
            f"{both}{'' if len(fills) > 1 else ' and adds another mask'}, so that such rows have other weights; "
            "padding on the left makes some, and the label of the first token after it reads the last: ignore it"
        )
        return None
    if not all(_finite(m) for _, m in added):
        notes.append(
            "a row that keeps only keys which the added mask hides has no weight on the others, which the model sets "
            f"to {next(iter(fills))} too; a row that keeps none is the mean of the values, as in the model"
        )
    allowed = None
    for kind, arg, where in masks:
        if kind != "add":
            arg = shaped(arg if kind == "keep" else rewrite.insert(gm, root, aten.logical_not.default, (arg,)), where)
            allowed = arg if allowed is None else rewrite.insert(gm, root, aten.logical_and.default, (allowed, arg))
    return rewrite.insert(gm, root, aten.any.dim, (allowed, -1, True))


def with_means(gm: fx.GraphModule, root: fx.Node, out: fx.Node, remaining: fx.Node, v: fx.Node) -> fx.Node:
    """``out``, [batch, heads, queries, dim], with the mean of ``v``, [batch, kv_heads, keys, dim], in the rows where
    nothing is ``remaining``.
    """
    mean = rewrite.insert(gm, root, aten.mean.dim, (v, [-2], True))
    batch, heads, _, dim = match.value(out).shape
    own = match.value(v).shape[1]
    if not statically_known_true(own == heads):
        mean = rewrite.insert(
            gm,
            root,
            aten.expand.default,
            (rewrite.insert(gm, root, aten.unsqueeze.default, (mean, 2)), [batch, own, heads // own, 1, dim]),
        )
        mean = rewrite.insert(gm, root, aten.reshape.default, (mean, [batch, heads, 1, dim]))
    return rewrite.insert(gm, root, aten.where.self, (remaining, out, mean))


def _finite(added: fx.Node) -> bool:
    """Whether what is added to the scores hides nothing: it is trained, or a distance."""
    return added.meta["needs_grad"] or isinstance(positions.meaning(added), Distance)


def _own_key(scores: Scores) -> bool:
    """Whether every row certainly keeps its own key."""
    return all(mask.keeps_own_key(*masked) for masked in scores.blocking)


def _alike_for_queries(m: fx.Node, depth: int = 12) -> bool:
    """Whether a mask is the same for every query, as padding is."""
    shape = match.value(m).shape
    if len(shape) < 2 or statically_known_true(shape[-2] == 1):
        return True
    passes_on = match.is_call(m, aten.expand.default) or (is_pointwise(m.target) and not is_random(m.target))
    return depth > 0 and passes_on and all(_alike_for_queries(a, depth - 1) for a in m.all_input_nodes)


def _amount(kind: str, m: fx.Node, where: fx.Node) -> float | None:
    """What a mask sets scores to, or adds to them, that it hides; None where it is not known to hide any."""
    return mask.added(m) if kind == "add" else _fill(where)


def _fill(where: fx.Node) -> float:
    """What ``where`` sets hidden scores to; minus infinity also where it is no number of its own."""
    position = {
        aten.masked_fill.Scalar: 2,
        aten.masked_fill.Tensor: 2,
        aten.where.ScalarOther: 2,
        aten.where.ScalarSelf: 1,
    }.get(where.target)
    if where.target is aten.where.self:
        position = 1 if isinstance(positions.meaning(where.args[1]), (int, float)) else 2
    if position is not None:
        return float(mask.fill(where.args[position]))
    return -math.inf if where.target is aten.scaled_dot_product_attention.default else BLOCKED
