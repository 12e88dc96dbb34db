"""Cross-entropy written out: the log-probability of a target, picked from ``log_softmax`` or from logits less their
log-sum-exp, alone or with label smoothing.

The picked value is ``gather`` or ``take_along_dim`` along the classes, or an index of every row with its target. Label
smoothing adds the mean (or a share of the sum) of all log-probabilities: ``a * picked + b * mean`` is ``-(a + b)``
times the cross-entropy whose label smoothing is ``b / (a + b)``, also where both are masked and summed alike before
they meet (fairseq). Scalars, signs, casts, views and slices of tokens and the order of the operands do not matter. Used
by ``fusion.cross_entropy``.
"""

from __future__ import annotations

from typing import Any, Iterator, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import calls
from mindspeed_fx.passes.fusion.analysis import positions
from mindspeed_fx.passes.fusion.analysis.bands import Index

TIMES, OVER = (aten.mul.Tensor,), (aten.div.Tensor,)


FILLS = (aten.masked_fill.Scalar, aten.masked_fill.Tensor)


SUMS = (aten.sum.default, aten.mean.default, aten.sum.dim_IntList, aten.mean.dim)


PICKS = (aten.gather.default, aten.take_along_dim.default, aten.index.Tensor)


class Likelihood(NamedTuple):
    """``root`` is ``factor`` times the cross-entropy of ``logits`` [..., classes] and ``target`` [..., ] or [..., 1],
    token by token, after ``steps``.
    """

    root: fx.Node
    logits: fx.Node
    target: fx.Node
    smoothing: float
    factor: float
    region: list[fx.Node]
    steps: list["LossStep"] = []
    """What is done to the loss of each token before ``root``."""
    leaves: tuple[fx.Node, ...] = ()
    """Picked values, means and sums of log-probabilities that others may read, too."""


class LossStep(NamedTuple):
    """A linear function of a loss, the same for another one: a mask, a reduction, a quotient."""

    node: fx.Node
    source: fx.Node
    """The loss that ``node`` reads."""
    other: Any
    """The tensor it is multiplied with or divided by, without numbers."""

    def like(self, other: "LossStep") -> bool:
        if (
            self.node.target != other.node.target
            or not match.same(self.other, other.other)
            or (self.other is None and self.node.args[1:] != other.node.args[1:])
        ):
            return False
        return match.value(self.node).shape == match.value(other.node).shape or self.node.target not in SUMS


class _Term(NamedTuple):
    leaf: fx.Node
    """What the term is a multiple of: the picked value, or the mean or sum of all."""
    factor: float
    path: list[fx.Node]
    steps: list[LossStep]


def likelihoods(gm: fx.GraphModule) -> Iterator[Likelihood | tuple[fx.Node, str]]:
    """Every cross-entropy that is written out; (node, reason) for a near miss."""
    for node in calls(gm, aten.log_softmax.int, aten.sub.Tensor):
        if match.is_call(node, aten.sub.Tensor):
            result = _of_log_sum_exp(node) if not node.kwargs else None
        else:
            result = _of_log_softmax(node) if match.is_float(node) and is_last_dim(node, node.args[1]) else None
        if result is not None:
            yield result


# --------------------------------------------------------------------------- log_softmax


def acts_on_rows(n: fx.Node) -> bool:
    """Whether ``n`` takes, orders or views rows of classes whole."""
    views = (
        *match.RESHAPES,
        aten.slice.Tensor,
        aten.narrow.default,
        aten.transpose.int,
        aten.permute.default,
        aten.contiguous.default,
    )
    if (
        not match.is_call(n, *views)
        or match.value(n).dim() < 2
        or match.value(n).shape[-1] != match.value(n.args[0]).shape[-1]
        or n.meta["mutated"]
    ):
        return False
    last = match.value(n.args[0]).dim() - 1
    if match.is_call(n, aten.permute.default):
        return n.args[1][-1] % (last + 1) == last
    if match.is_call(n, aten.transpose.int):
        return all(d % (last + 1) != last for d in n.args[1:])
    return (
        not match.is_call(n, aten.slice.Tensor, aten.narrow.default) or match.argument(n, "dim", 0) % (last + 1) != last
    )


def _of_log_softmax(probs: fx.Node) -> Likelihood | tuple[fx.Node, str] | None:
    picks = [u for u in probs.users if picked_classes(u, probs) is not None]
    if not picks:
        return _unread(probs)
    logits, classes = probs.args[0], match.value(probs).shape[-1]
    others = [u for u in probs.users if u not in picks]
    if len(picks) > 1:
        return picks[0], f"{len(picks)} different log-probabilities are picked from one log_softmax"
    picked = picks[0]
    if not others:
        return Likelihood(picked, logits, picked_classes(picked, probs), 0.0, -1.0, [probs, picked])
    if len(others) > 1 or mean_weight(others[0], probs) is None:
        stranger = (
            next(o for o in others if mean_weight(o, probs) is None)
            if any(mean_weight(o, probs) is None for o in others)
            else others[1]
        )
        return (
            picked,
            f"the log-probabilities are also read by {stranger.name} ({stranger.target}); only a picked one and their "
            "mean may",
        )
    share, met = mean_weight(others[0], probs), _meeting(picked, others[0])
    if met is None:
        return (
            picked,
            "the picked log-probability and the mean of all do not meet in a weighted sum after the same masks and "
            "sums",
        )
    root, (first, second) = met
    one, all_ = (first, second) if first.leaf is picked else (second, first)
    signs = {id(first): 1.0, id(second): -1.0 if root.target is aten.sub.Tensor else 1.0}
    a, b = one.factor * signs[id(one)], all_.factor * share * signs[id(all_)]
    if a + b == 0 or not 0 <= b / (a + b) < 1:
        return picked, f"{a} times the picked log-probability and {b} times the mean of all are no label smoothing"
    if not isinstance(classes, int) and match.is_call(others[0], aten.sum.dim_IntList):
        return picked, "the number of classes is symbolic, so that the weight of their sum is too"
    region = [probs, picked, others[0], *one.path, *all_.path, root]
    return Likelihood(
        root, logits, picked_classes(picked, probs), b / (a + b), -(a + b), region, one.steps, (picked, others[0])
    )


READERS = {
    aten.mul.Tensor: "they are multiplied by a tensor that is neither one-hot nor smoothed with numbers: a loss of "
    "soft targets, for which there is no operator",
    aten.matmul.default: "they are multiplied by a tensor that is neither one-hot nor smoothed with numbers: a loss of "
    "soft targets, for which there is no operator",
    aten.kl_div.default: "kl_div adds the entropy of its targets; cross_entropy has the same gradient, and is fused "
    "for targets that are one-hot or smoothed",
    aten.index.Tensor: "they are picked by an index that is not (all rows, their targets)",
    aten.gather.default: "not one of each row is picked",
    aten.take.default: "they are picked from all rows at once; gather along the classes instead",
}


def _unread(probs: fx.Node) -> tuple[fx.Node, str] | None:
    """Why log-probabilities from which something is picked or summed are no loss."""
    seen, now = set(), [probs]
    for _ in range(4):
        now = [u for n in now for u in n.users if u not in seen and match.is_float(u)]
        seen.update(now)
        for user in now:
            if user.target in READERS and user.meta["needs_grad"]:
                return user, f"of the log-probabilities {READERS[user.target]}"
        now = [n for n in now if match.is_call(n, aten.neg.default, aten.to.dtype, *match.RESHAPES)]
    return None


def is_last_dim(x: fx.Node, dim: Any) -> bool:
    """Whether ``dim``, or the one of a list, is the last of ``x``."""
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return dim is not None and [d % match.rank(x) for d in dims] == [match.value(x).dim() - 1]


def picked_classes(n: Any, source: fx.Node) -> fx.Node | None:
    """The classes that ``n`` picks from ``source``, one of each row; [...] or [..., 1]."""
    tokens = list(match.value(source).shape[:-1])
    if match.is_call(n, aten.gather.default, aten.take_along_dim.default) and n.args[0] is source:
        dim, index = (
            (n.args[1], n.args[2]) if n.target is aten.gather.default else (match.argument(n, "dim"), n.args[1])
        )
        whole = (
            dim is not None
            and is_last_dim(source, dim)
            and list(match.value(n).shape) == [*tokens, 1] == list(match.value(index).shape)
        )
        return index if whole else None
    if (
        match.is_call(n, aten.index.Tensor)
        and n.args[0] is source
        and match.value(source).dim() == len(n.args[1]) > 1
        and None not in n.args[1]
    ):
        *rows, target = n.args[1]
        places = [Index(len(tokens) - i, 0) for i, _ in enumerate(tokens)]
        whole = [positions.meaning(r) for r in rows] == places and list(match.value(target).shape) == tokens == list(
            match.value(n).shape
        )
        return target if whole and match.value(target).dtype == torch.int64 else None
    return None


def mean_weight(n: Any, source: fx.Node) -> float | None:
    """What the mean over the classes is multiplied with in ``n``: 1 for the mean, their number for the sum."""
    if (
        not match.is_call(n, aten.mean.dim, aten.sum.dim_IntList)
        or n.args[0] is not source
        or not is_last_dim(source, n.args[1])
        or match.value(n).dtype.itemsize < match.value(source).dtype.itemsize
    ):
        return None
    return (
        1.0
        if n.target is aten.mean.dim
        else float(match.value(source).shape[-1])
        if isinstance(match.value(source).shape[-1], int)
        else 1.0
    )


def _meeting(a: fx.Node, b: fx.Node) -> tuple[fx.Node, tuple[_Term, _Term]] | None:
    """(sum or difference of multiples of ``a`` and ``b`` after the same steps, its two terms)."""
    seen, now = {a}, [a]
    for _ in range(12):
        now = [u for n in now for u in n.users if u not in seen and match.is_float(u)]
        seen.update(now)
        for n in now:
            if (
                match.is_call(n, aten.add.Tensor, aten.sub.Tensor)
                and not n.kwargs
                and all(isinstance(x, fx.Node) and match.is_float(x) for x in n.args)
            ):
                one, other = (_term(x, {a, b}) for x in n.args)
                alike = len(one.steps) == len(other.steps) and all(s.like(t) for s, t in zip(one.steps, other.steps))
                same = match.value(n.args[0]).shape == match.value(n.args[1]).shape
                if {one.leaf, other.leaf} == {a, b} and alike and same:
                    return n, (one, other)
    return None


def _term(n: fx.Node, leaves: set[fx.Node] | None = None) -> _Term:
    """``n`` through signs, numbers, casts and views that drop or add a last 1, and where there are ``leaves`` through
    steps, as far as one of them.
    """
    factor, path, steps = 1.0, [], []
    while leaves is None or n not in leaves:
        inner, scale_by = match.unscale(n)
        step = None
        if inner is n and match.is_call(n, aten.neg.default):
            inner, scale_by = n.args[0], -1.0
        elif (
            inner is n
            and match.is_call(
                n, aten.to.dtype, aten.squeeze.dim, aten.unsqueeze.default, aten.select.int, *match.RESHAPES
            )
            and match.is_float(n.args[0])
            and _keeps_tokens(n)
        ):
            inner = n.args[0]
        elif inner is n and leaves is not None and (step := _step(n, leaves)) is not None:
            inner, scale_by = step.source, 1.0
            if n.target in OVER:
                scale_by = 1.0 / match.unscale(n.args[1])[1]
            steps.append(step)
        if inner is n:
            break
        walk = n
        while walk is not inner:
            path.append(walk)
            walk = (
                step.source
                if step is not None
                else next(a for a in walk.args if isinstance(a, fx.Node) and match.number(a) is None)
            )
        n, factor = inner, factor * scale_by
    return _Term(n, factor, path[::-1], steps[::-1])


def _step(n: fx.Node, leaves: set[fx.Node]) -> LossStep | None:
    if match.is_call(n, *SUMS) and match.argument(n, "dtype") is None:
        return LossStep(n, n.args[0], None)
    if match.is_call(n, *FILLS) and match.number(n.args[2]) == 0:
        return LossStep(n, n.args[0], n.args[1])
    if match.is_call(n, *OVER) and not n.kwargs and isinstance(n.args[1], fx.Node):
        return LossStep(n, n.args[0], match.unscale(n.args[1])[0])
    for x, other in match.operands(n, *TIMES):
        if isinstance(other, fx.Node) and match.is_float(x) and _leads_to(x, leaves) and not _leads_to(other, leaves):
            return LossStep(n, x, other)
    return None


def _leads_to(n: Any, leaves: set[fx.Node], depth: int = 12) -> bool:
    return isinstance(n, fx.Node) and (
        n in leaves
        or (depth > 0 and any(_leads_to(a, leaves, depth - 1) for a in n.all_input_nodes if match.is_float(a)))
    )


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
        if not match.is_call(lse.leaf, aten.logsumexp.default) or not is_last_dim(lse.leaf.args[0], lse.leaf.args[1]):
            continue
        logits = lse.leaf.args[0]
        target = picked_classes(picked.leaf, picked.leaf.args[0]) if match.is_call(picked.leaf, *PICKS) else None
        if target is None or match.uncast(picked.leaf.args[0]) is not match.uncast(logits):
            continue
        if lse.factor != picked.factor or match.value(node.args[0]).shape != match.value(node.args[1]).shape:
            return node, "the log-sum-exp and the picked logit are weighed differently"
        return Likelihood(
            node, logits, target, 0.0, sign * lse.factor, [lse.leaf, picked.leaf, *lse.path, *picked.path, node]
        )
    return None
