"""The router of a mixture of experts, read from its choice: scores, bias, groups, and what becomes of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.passes.base import Miss

SOFTMAX = (aten.softmax.int, aten._softmax.default)
NOT = (aten.bitwise_not.default, aten.logical_not.default)
SMALLEST = 1e-8
"""A least sum of weights up to this stands for an eps: the sum of the largest of n softmaxes is at least 1 / n."""


@dataclass
class Router:
    """``router_topk(logits, bias, k, score, groups, kept, best, eps, scale)``, and what it replaces.

    Args:
        logits: [..., experts], a node or a call that widens it.
        weights: the node that is the weights.
        ids: the node that is the choice, or None where nothing reads it.
        region: all nodes between.
    """

    logits: Any
    bias: fx.Node | None
    k: int
    score: str
    groups: int
    kept: int
    best: int
    weights: fx.Node
    ids: fx.Node | None
    eps: float | None = None
    scale: float = 1.0
    region: list[fx.Node] = field(default_factory=list)


def read(topk: fx.Node) -> Router | None:
    """The router whose choice is ``topk``; None where it chooses no experts, or nobody reads their weights.

    Raises:
        Miss: nearly a router; why not.
    """
    values, ids = (_item(topk, i) for i in (0, 1))
    k, x = match.argument(topk, "k"), topk.args[0]
    if not isinstance(k, int) or not _is_last(topk, match.argument(topk, "dim")) or not match.argument(topk, "largest"):
        return None
    masked = _read_mask(x)
    choice = masked.choice if masked else x
    seen: list[fx.Node] = []
    scores, bias = _without_bias(choice, seen)
    kind = _score(scores)
    if kind is None:
        if scores is not match.uncast(scores) and _score(match.uncast(scores)):
            _refuse_narrow(match.value(scores).dtype)
        return _read_softmax_of_chosen(topk, k, values, ids) if not masked else None
    weights, way = _weights(scores, values, ids, bias, seen)
    if weights is None:
        return None
    experts = match.value(scores).shape[-1]
    groups, kept, best = (masked.groups, masked.kept, masked.best) if masked else (1, 1, 1)
    if masked and masked.fill == 0 and bias is not None:
        raise Miss("experts of groups that are left out get 0, which a bias may make more than another's score")
    if masked and k > experts // groups * kept:
        raise Miss(f"{k} experts are chosen of the {experts // groups * kept} that their groups leave")
    logits = _logits(scores)
    region = [scores, *seen, *([choice] if bias is not None else []), *(masked.region if masked else []), topk, *way]
    router = Router(logits, bias, k, kind, groups, kept, best, weights, ids, region=region)
    _extend(router)
    return router


def _item(n: fx.Node, index: int) -> fx.Node | None:
    """Result ``index`` of ``n``, where something reads it."""
    return next((u for u in n.users if match.is_call(u, match.operator.getitem) and u.args[1] == index), None)


def _is_last(n: fx.Node, dim: int, rank: int | None = None) -> bool:
    rank = rank or match.rank(n.args[0])
    return dim in (-1, rank - 1)


# --------------------------------------------------------------------------- scores


def _score(n: Any) -> str | None:
    if match.is_call(n, aten.sigmoid.default):
        return "sigmoid"
    return "softmax" if match.is_call(n, *SOFTMAX) and _is_last(n, match.argument(n, "dim")) else None


def _without_bias(choice: Any, seen: list[fx.Node]) -> tuple[Any, fx.Node | None]:
    """(scores, bias) of scores + bias; reshapes of the scores that leave their shape, and the bias as a row, go to
    ``seen``."""
    for x, bias in match.operands(choice, *match.ADD):
        views: list[fx.Node] = []
        scores = _unviewed(x, views)
        if _score(scores) is None or not isinstance(bias, fx.Node) or not match.is_float(bias):
            continue
        if match.is_call(bias, aten.unsqueeze.default) and bias.args[1] == 0 and match.rank(scores) == 2:
            views.append(bias)
            bias = bias.args[0]
        shape = tuple(match.value(bias).shape)
        if shape != tuple(match.value(scores).shape[-1:]):
            raise Miss(f"what is added to the scores has shape {list(shape)}; one number for each expert is expected")
        seen += views
        return scores, bias
    views = []
    scores = _unviewed(choice, views)
    if _score(scores) is None:
        return choice, None
    seen += views
    return scores, None


def _unviewed(n: Any, views: list[fx.Node]) -> Any:
    """``n`` before reshapes that leave its shape."""
    while match.is_call(n, *match.RESHAPES) and match.value(n).shape == match.value(n.args[0]).shape:
        views.append(n)
        n = n.args[0]
    return n


def _refuse_narrow(dtype: torch.dtype) -> None:
    if accumulation_dtype(dtype) != dtype:
        name = str(dtype).removeprefix("torch.")
        raise Miss(f"scores are in {name}, and the choice among them could be another one in float32")


def _logits(scores: fx.Node) -> Any:
    """What the scores are of: without the cast that the operator makes itself, with one where it would make another."""
    x, dtype = scores.args[0], match.value(scores).dtype
    _refuse_narrow(dtype)
    if match.is_call(x, aten.to.dtype) and accumulation_dtype(match.value(x.args[0]).dtype) == dtype:
        x = x.args[0] if match.is_float(x.args[0]) else x
    if accumulation_dtype(match.value(x).dtype) == dtype:
        return x
    return NewCall(scores, aten.to.dtype, x, dtype)


# --------------------------------------------------------------------------- groups


@dataclass
class Mask:
    """Scores without the groups that are not kept."""

    choice: fx.Node
    groups: int
    kept: int
    best: int
    fill: float
    region: list[fx.Node]


def _read_mask(n: Any) -> Mask | None:
    """The mask of a choice by groups; None where ``n`` is no masked value."""
    region: list[fx.Node] = []
    scores = _through(n, region, match.RESHAPES)  # masked as [..., groups, experts of a group]
    if match.is_call(scores, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        (inner, mask, fill), dropped_if = scores.args, True
    elif match.is_call(scores, aten.where.self, aten.where.ScalarOther):
        (mask, inner, fill), dropped_if = scores.args, False
    else:
        return None
    fill = match.number(fill)
    if fill not in (0, -math.inf):
        return None
    region.append(scores)
    inner = _through(inner, region, match.RESHAPES)
    chosen, dropped = _read_groups(mask, region)
    if chosen is None or dropped != dropped_if:
        return None
    grouped, best = _read_group_scores(chosen.args[0], region)
    if grouped is None:
        return None
    region.append(chosen)
    groups, kept = match.value(chosen.args[0]).shape[-1], match.argument(chosen, "k")
    if not match.argument(chosen, "largest") or not _is_last(chosen, match.argument(chosen, "dim")):
        return None
    if _through(grouped, region, match.RESHAPES) is not inner:
        raise Miss("groups are scored by other numbers than those they are chosen from")
    if list(match.value(grouped).shape[-2:]) != [groups, match.value(inner).shape[-1] // groups]:
        return None
    if match.value(n).shape != match.value(inner).shape:
        return None
    return Mask(inner, groups, kept, best, fill, region)


def _through(n: Any, region: list[fx.Node], targets: tuple) -> Any:
    while match.is_call(n, *targets):
        region.append(n)
        n = n.args[0]
    return n


def _read_groups(mask: Any, region: list[fx.Node]) -> tuple[fx.Node | None, bool]:
    """(topk of groups, whether ``mask`` is True where a group is left out), of a mask that follows whole groups."""
    flipped = False
    while True:
        if match.is_call(mask, *NOT) and match.value(mask).dtype == torch.bool:
            flipped = not flipped
        elif match.is_call(mask, aten.unsqueeze.default):
            if not _is_last(mask, mask.args[1], match.rank(mask)):
                return None, False  # groups that alternate
        elif not match.is_call(mask, aten.to.dtype, aten.expand.default, aten.clone.default, *match.RESHAPES):
            break
        region.append(mask)
        mask = mask.args[0]
    if not match.is_call(mask, aten.scatter.value) or not _is_last(mask, mask.args[1]):
        return None, False
    start, _, index, at_chosen = mask.args
    elsewhere = _constant(start)
    ids = match.is_call(index, match.operator.getitem) and index.args[1] == 1
    if not ids or not match.is_call(index.args[0], aten.topk.default) or {elsewhere, at_chosen} != {0, 1}:
        return None, False
    region += [mask, start, index]
    return index.args[0], bool(elsewhere) != flipped


def _constant(n: Any) -> int | None:
    """0 or 1 where every element of ``n`` is."""
    if match.is_zeros(n):
        return 0
    if match.is_call(n, aten.ones_like.default, aten.ones.default, aten.new_ones.default) and not n.meta["mutated"]:
        return 1
    full = match.is_call(n, aten.full.default, aten.full_like.default, aten.new_full.default)
    return 1 if full and match.argument(n, "fill_value") == 1 and not n.meta["mutated"] else None


def _read_group_scores(n: Any, region: list[fx.Node]) -> tuple[Any, int]:
    """(grouped choice, how many of a group's best add up to its score)."""
    region.append(n)
    if match.is_call(n, aten.amax.default) and list(match.argument(n, "dim")) in ([-1], [match.rank(n.args[0]) - 1]):
        return (None, 0) if match.argument(n, "keepdim") else (n.args[0], 1)
    if match.is_call(n, match.operator.getitem) and n.args[1] == 0 and match.is_call(n.args[0], aten.max.dim):
        maximum = n.args[0]
        region.append(maximum)
        plain = _is_last(maximum, maximum.args[1]) and not match.argument(maximum, "keepdim")
        return (maximum.args[0], 1) if plain else (None, 0)
    if not _is_sum(n, keepdim=False) or not match.is_call(n.args[0], match.operator.getitem) or n.args[0].args[1]:
        return None, 0
    topk = n.args[0].args[0]
    if not match.is_call(topk, aten.topk.default) or not _is_last(topk, match.argument(topk, "dim")):
        return None, 0
    best = match.argument(topk, "k")
    if not match.argument(topk, "largest") or best not in (1, 2):
        raise Miss(f"a group is scored by the sum of {best} of its experts; valid: 1 or 2 of its best")
    region += [n.args[0], topk]
    return topk.args[0], best


def _is_sum(n: Any, keepdim: bool) -> bool:
    """Whether ``n`` is a sum over the last dimension in the type of what it adds."""
    if not match.is_call(n, aten.sum.dim_IntList) or bool(match.argument(n, "keepdim")) != keepdim:
        return False
    x = n.args[0]
    return list(n.args[1]) in ([-1], [match.rank(x) - 1]) and match.value(n).dtype == match.value(x).dtype


# --------------------------------------------------------------------------- weights


def _weights(
    scores: fx.Node, values: Any, ids: Any, bias: Any, seen: list[fx.Node]
) -> tuple[fx.Node | None, list[fx.Node]]:
    """(the scores of the chosen experts, nodes on the way), None where nobody reads them; ``values`` and ``ids`` are
    the results of the choice, ``seen`` views of the scores.
    """
    gathers = [
        u
        for u in (ids.users if ids is not None else ())
        if match.is_call(u, aten.gather.default) and _is_last(u, u.args[1]) and u.args[2] is ids
    ]
    own = [g for g in gathers if g.args[0] in (scores, *seen)]
    way = [n for n in (values, ids) if n is not None]
    if values is not None and values.users:
        if bias is not None:
            raise Miss("the weights hold the bias, which the operator adds for the choice alone")
        if own:
            raise Miss("weights are read both from the choice and from the scores")
        return values, way
    return (own[0], [*way, own[0]]) if len(own) == 1 else (None, [])


def _extend(router: Router) -> None:
    """Take in what follows the weights: their division by their sum, and a scale."""
    n = router.weights
    if division := _read_division(n):
        n, router.eps, way = division
        router.region += way
    while len(n.users) == 1:
        user = next(iter(n.users))
        scale = next((c for x, y in match.operands(user, *match.MUL) if x is n and (c := match.number(y))), None)
        if scale is None and match.is_call(user, *match.DIV) and user.args[0] is n and not user.kwargs:
            scale = 1 / c if (c := match.number(user.args[1])) else None
        if not scale or match.value(user).dtype != match.value(n).dtype:
            break
        router.scale *= scale
        router.region.append(user)
        n = user
    router.weights = n


def _read_division(n: fx.Node) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """(quotient, eps, nodes) where ``n`` is read by its sum and by its division by it alone."""
    total = next((u for u in n.users if _is_sum(u, keepdim=True)), None)
    if total is None or len(n.users) != 2 or len(total.users) != 1:
        return None
    divisor, eps = total, 0.0
    user = next(iter(total.users))
    if (plus := match.plus_number(user)) is not None:
        divisor, eps = user, float(plus[1])
    elif match.is_call(user, aten.clamp.default, aten.clamp_min.default) and match.argument(user, "max", None) is None:
        least = match.number(match.argument(user, "min"))
        if least is None or not 0 <= least <= SMALLEST:
            raise Miss(f"weights are divided by their sum, but at least by {least}; up to {SMALLEST} is an eps")
        divisor, eps = user, float(least)
    if len(divisor.users) != 1:
        return None
    quotient = next(iter(divisor.users))
    if not match.is_call(quotient, aten.div.Tensor) or quotient.args[:2] != (n, divisor) or quotient.kwargs:
        return None
    return quotient, eps, list(dict.fromkeys([total, divisor, quotient]))


def _read_softmax_of_chosen(topk: fx.Node, k: int, values: Any, ids: Any) -> Router | None:
    """A softmax of the k largest logits, which is that of all whose chosen parts are divided by their sum."""
    if values is None or len(values.users) != 1 or ids is None or not match.is_float(topk.args[0]):
        return None
    softmax = next(iter(values.users))
    region = [topk, values, ids]
    if match.is_call(softmax, aten.to.dtype) and match.is_float(softmax) and len(softmax.users) == 1:
        region.append(softmax)
        softmax = next(iter(softmax.users))
    if not match.is_call(softmax, *SOFTMAX) or not _is_last(softmax, match.argument(softmax, "dim")):
        return None
    return Router(topk.args[0], None, k, "softmax", 1, 1, 1, softmax, ids, eps=0.0, region=[*region, softmax])
