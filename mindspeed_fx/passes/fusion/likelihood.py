"""Cross-entropy written out: the log-probability of a target, picked from ``log_softmax`` or from logits less their log-sum-exp, alone or
with label smoothing.

The picked value is ``gather`` along the classes, or an index of every row with its target. Label smoothing adds the mean (or a share of
the sum) of all log-probabilities: ``a * picked + b * mean`` is ``-(a + b)`` times the cross-entropy whose label smoothing is
``b / (a + b)``. Scalars, signs, casts, views that drop the last 1 and the order of the operands do not matter. Used by
``fusion.cross_entropy``.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.passes.fusion import mask, match
from mindspeed_fx.passes.fusion.match import aten


class Likelihood(NamedTuple):
    """``root`` is ``factor`` times the cross-entropy of ``logits`` [..., classes] and ``target`` [..., ] or [..., 1], token by token."""

    root: fx.Node
    logits: fx.Node
    target: fx.Node
    smoothing: float
    factor: float
    region: list[fx.Node]


class _Term(NamedTuple):
    leaf: fx.Node
    """What the term is a multiple of: the picked value, or the mean or sum of all."""
    factor: float
    path: list[fx.Node]


def likelihoods(gm: fx.GraphModule) -> Iterator[Likelihood | tuple[fx.Node, str]]:
    """Every cross-entropy that is written out; (node, reason) for a near miss."""
    for node in list(gm.graph.nodes):
        if match.is_call(node, aten.log_softmax.int) and match.is_float(node) and _last(node, node.args[1]):
            found = _of_log_softmax(node)
        elif match.is_call(node, aten.sub.Tensor) and not node.kwargs:
            found = _of_log_sum_exp(node)
        else:
            continue
        if found is not None:
            yield found


# --------------------------------------------------------------------------- log_softmax


def _of_log_softmax(probs: fx.Node) -> Likelihood | tuple[fx.Node, str] | None:
    picks = [u for u in probs.users if _target(u, probs) is not None]
    if not picks:
        return None
    logits, classes = probs.args[0], match.value(probs).shape[-1]
    others = [u for u in probs.users if u not in picks]
    if len(picks) > 1:
        return picks[0], f"{len(picks)} different log-probabilities are picked from one log_softmax"
    picked = picks[0]
    if not others:
        return Likelihood(picked, logits, _target(picked, probs), 0.0, -1.0, [probs, picked])
    if len(others) > 1 or _share(others[0], probs) is None:
        stranger = next(o for o in others if _share(o, probs) is None) if any(_share(o, probs) is None for o in others) else others[1]
        return picked, f"the log-probabilities are also read by {stranger.name} ({stranger.target}); only a picked one and their mean may"
    share, root = _share(others[0], probs), _meeting(picked, others[0])
    if root is None:
        return picked, "the picked log-probability and the mean of all do not meet in a weighted sum per token; weigh and add them before reducing"
    terms = {t.leaf: t for t in (_term(a) for a in root.args)}
    one, all_ = terms[picked], terms[others[0]]
    a = one.factor
    b = all_.factor * share * (-1 if root.target is aten.sub.Tensor and root.args[1] in (all_.path[-1:] or [all_.leaf]) else 1)
    a = -a if root.target is aten.sub.Tensor and root.args[1] in (one.path[-1:] or [one.leaf]) else a
    if a + b == 0 or not 0 <= b / (a + b) < 1:
        return picked, f"{a} times the picked log-probability and {b} times the mean of all are no label smoothing"
    if not isinstance(classes, int) and match.is_call(others[0], aten.sum.dim_IntList):
        return picked, "the number of classes is symbolic, so that the weight of their sum is too"
    return Likelihood(root, logits, _target(picked, probs), b / (a + b), -(a + b), [probs, picked, others[0], *one.path, *all_.path, root])


def _last(x: fx.Node, dim: Any) -> bool:
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return [d % match.value(x).dim() for d in dims] == [match.value(x).dim() - 1]


def _target(n: Any, source: fx.Node) -> fx.Node | None:
    """The classes that ``n`` picks from ``source``, one of each row; [...] or [..., 1]."""
    if match.is_call(n, aten.gather.default) and n.args[0] is source and _last(source, n.args[1]) and list(match.value(n).shape) == [*match.value(source).shape[:-1], 1]:
        return n.args[2]
    if match.is_call(n, aten.index.Tensor) and n.args[0] is source and match.value(source).dim() == 2 and len(n.args[1]) == 2 and None not in n.args[1]:
        rows, target = n.args[1]
        whole = isinstance(mask.meaning(rows), mask.Index) and mask.meaning(rows).offset == 0 and match.value(rows).shape == match.value(target).shape == match.value(source).shape[:1]
        return target if whole and match.value(target).dtype == torch.int64 else None
    return None


def _share(n: Any, source: fx.Node) -> float | None:
    """What the mean over the classes is multiplied with in ``n``: 1 for the mean, their number for the sum."""
    if not match.is_call(n, aten.mean.dim, aten.sum.dim_IntList) or n.args[0] is not source or not _last(source, n.args[1]):
        return None
    return 1.0 if n.target is aten.mean.dim else float(match.value(source).shape[-1]) if isinstance(match.value(source).shape[-1], int) else 1.0


def _meeting(a: fx.Node, b: fx.Node) -> fx.Node | None:
    """The sum or difference of multiples of ``a`` and ``b``, element by element; both may be read on the way to it alone."""
    n = a
    while len(n.users) == 1:
        n = next(iter(n.users))
        if match.is_call(n, aten.add.Tensor, aten.sub.Tensor) and not n.kwargs and all(isinstance(x, fx.Node) and match.is_float(x) for x in n.args):
            terms = [_term(x) for x in n.args]
            alone = all(len(p.users) == 1 for t in terms for p in (t.leaf, *t.path))
            same = match.value(n.args[0]).shape == match.value(n.args[1]).shape
            return n if {t.leaf for t in terms} == {a, b} and alone and same else None
    return None


def _term(n: fx.Node) -> _Term:
    """``n`` through signs, numbers, casts and views that drop or add a last 1."""
    factor, path = 1.0, []
    while True:
        inner, by = match.unscale(n)
        if inner is n and match.is_call(n, aten.neg.default):
            inner, by = n.args[0], -1.0
        elif inner is n and match.is_call(n, aten.to.dtype, aten.squeeze.dim, aten.unsqueeze.default, aten.select.int, *match.VIEWS) and match.is_float(n.args[0]) and _keeps_tokens(n):
            inner = n.args[0]
        if inner is n:
            return _Term(n, factor, path[::-1])
        walk = n
        while walk is not inner:
            path.append(walk)
            walk = next(a for a in walk.args if isinstance(a, fx.Node) and match.number(a) is None)
        n, factor = inner, factor * by


def _keeps_tokens(n: fx.Node) -> bool:
    def tokens(x: fx.Node) -> list[Any]:
        shape = list(match.value(x).shape)
        return shape[:-1] if shape and isinstance(shape[-1], int) and shape[-1] == 1 else shape

    return tokens(n) == tokens(n.args[0])


# --------------------------------------------------------------------------- logits less their log-sum-exp


def _of_log_sum_exp(node: fx.Node) -> Likelihood | tuple[fx.Node, str] | None:
    """``logsumexp(x) - x[target]``, or the other way round."""
    one, other = (_term(x) if isinstance(x, fx.Node) else None for x in node.args)
    if one is None or other is None:
        return None
    for (lse, picked), sign in (((one, other), 1.0), ((other, one), -1.0)):
        if not match.is_call(lse.leaf, aten.logsumexp.default) or not _last(lse.leaf.args[0], lse.leaf.args[1]):
            continue
        logits = lse.leaf.args[0]
        target = _target(picked.leaf, picked.leaf.args[0]) if match.is_call(picked.leaf, aten.gather.default, aten.index.Tensor) else None
        if target is None or match.uncast(picked.leaf.args[0]) is not match.uncast(logits):
            continue
        if lse.factor != picked.factor or match.value(node.args[0]).shape != match.value(node.args[1]).shape:
            return node, "the log-sum-exp and the picked logit are weighed differently"
        return Likelihood(node, logits, target, 0.0, sign * lse.factor, [lse.leaf, picked.leaf, *lse.path, *picked.path, node])
    return None
