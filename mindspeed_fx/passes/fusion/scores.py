"""What stands before the softmax of an attention: the product q k^T, through scales, casts, views, masks, soft-caps and sinks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from mindspeed_fx import compat
from mindspeed_fx.passes.fusion import heads, mask, match
from mindspeed_fx.passes.fusion.match import aten


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


class Miss(Exception):
    """A near miss; the text is the reason."""


def with_sinks(n: Any) -> Scores | None:
    """:func:`_product`, where a column of one score per head may be joined."""
    if match.is_call(n, aten.to.dtype):
        return _extended(with_sinks(n.args[0]), n)
    if not match.is_call(n, aten.cat.default) or len(n.args[0]) != 2 or match.argument(n, "dim", 0) % match.value(n).dim() != match.value(n).dim() - 1:
        return _product(n)
    scores, column = _product(n.args[0][0]), match.uncast(n.args[0][1])
    heads_of = match.value(n).shape[1] if match.value(n).dim() == 4 else None
    if scores is not None and match.value(n).dim() == 4 and list(match.value(column).shape) == [*match.value(n).shape[:-1], 1] and not match.is_call(column, aten.expand.default):
        scores.sinks = match.insert(n.graph.owning_module, n, aten.squeeze.dim, (column, -1))  # a sink of its own for each query
        return _extended(scores, n)
    column = heads.source_of(column, aten.expand.default, aten.to.dtype)
    lined_up = list(match.value(column).shape) == [1, heads_of, 1, 1]
    column = heads.source_of(column, *match.VIEWS, aten.unsqueeze.default)
    if scores is None or not lined_up or list(match.value(column).shape) != [heads_of]:
        return None
    scores.sinks = column
    return _extended(scores, n)


def culprit(n: Any, depth: int = 12) -> str | None:
    """The operator between the softmax and a product of two activations that no rule covers; None without such a product."""
    if not depth or not isinstance(n, fx.Node) or n.op != "call_function":
        return None
    if match.is_call(n, aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default):
        return str(n.target)
    inner = next((a for a in n.all_input_nodes if match.is_float(a)), None)
    below = culprit(inner, depth - 1)
    if match.is_call(n, aten.mul.Tensor) and match.is_float(n.args[0]) and match.is_float(n.args[1]) and below is not None:
        return "they are multiplied by a tensor, which is no mask unless its zeros are known while compiling"
    known = match.is_call(n, aten.to.dtype, aten.masked_fill.Scalar, aten.masked_fill.Tensor, aten.where.self, *match.VIEWS, *match.ADD) or match.unscale(n)[0] is not n
    return below if known or below is None else f"{n.target} ({n.name})"


def _product(n: Any, depth: int = 20) -> Scores | None:
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
        return _capped(_product(inner.args[0], depth - 1), n, inner, factor)
    if inner is not n:
        scores = _product(inner, depth - 1)
        if scores:
            scores.masks = [(kind, _scaled(n, m, factor) if kind == "add" and mask.kept(m, kind) is None else m, where) for kind, m, where in scores.masks]
        if scores and scores.softcap:
            raise Miss("the scores are scaled after the soft-cap")
        return _extended(scores, n, factor=factor)
    if match.is_call(n, aten.to.dtype) or (match.is_call(n, *match.VIEWS) and match.value(n).shape[-2:] == match.value(n.args[0]).shape[-2:]):
        return _extended(_product(n.args[0], depth - 1), n)
    if match.is_call(n, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _blocks(n.args[2]):
        return _extended(_product(n.args[0], depth - 1), n, ("drop", n.args[1]))
    if match.is_call(n, aten.where.self, aten.where.ScalarOther) and _blocks(n.args[2]):
        return _extended(_product(n.args[1], depth - 1), n, ("keep", n.args[0]))
    if match.is_call(n, aten.where.self, aten.where.ScalarSelf) and _blocks(n.args[1]):
        return _extended(_product(n.args[2], depth - 1), n, ("drop", n.args[0]))
    if (scores := _bounded(n, depth)) is not None:
        return scores
    for a, b in match.operands(n, *match.ADD):
        if match.number(b) == 0:
            return _extended(_product(a, depth - 1), n)
        scores = (_gated(a, b, depth) or _product(a, depth - 1)) if match.is_float(b) else None
        if scores is not None:
            return _extended(scores, n, ("add", b))
    if match.is_call(n, aten.sub.Tensor) and not n.kwargs and match.is_float(n.args[1]):
        scores = _product(n.args[0], depth - 1)
        return scores and _extended(scores, n, ("add", match.insert(n.graph.owning_module, n, aten.neg.default, (n.args[1],))))
    return None


def _bounded(n: fx.Node, depth: int) -> Scores | None:
    """max(scores, a number that blocks) (XGLM): nothing but what is masked is so low, and every row keeps its own key."""
    pairs = [(n.args[0], match.argument(n, "min"))] if match.is_call(n, aten.clamp_min.default) else match.operands(n, aten.maximum.default, aten.max.other)
    found = next(((x, least) for x, b in pairs if (least := match.number(b)) is not None and least <= mask.BLOCKED), None)
    scores = _product(found[0], depth - 1) if found else None
    if scores is None:
        return None
    bands = [mask.kept(m, kind) for kind, m, _ in scores.masks]
    shape = match.value(n).shape
    if not all(b is not None and b.low <= 0 <= b.high for b in bands) or not compat.statically_known_true(shape[-1] == shape[-2]):
        raise Miss("the scores are bounded from below, and a mask may hide a whole row")
    return _extended(scores, n)


def _scaled(n: fx.Node, m: fx.Node, factor: float) -> fx.Node:
    """The additive mask ``m``, which the scores had when ``n`` scaled them."""
    return match.insert(n.graph.owning_module, n, aten.mul.Tensor, (m, factor))


def _gated(n: Any, bias: fx.Node, depth: int) -> Scores | None:
    """scores * keep, to which ``bias`` adds a number that blocks wherever ``keep``, made of positions, is zero (GPT): the bias alone then
    says what is masked, as long as every row keeps its own key."""
    band, given = mask.meaning(bias), None
    for a, b in match.operands(n, aten.mul.Tensor):
        if match.is_float(a) and match.is_float(b) and isinstance(keep := mask.meaning(b), mask.Band):
            given = a, keep
    if given is None:
        return None
    inner, keep = given
    blocking = isinstance(band, mask.Band) and (band.low, band.high, band.inside) == (keep.low, keep.high, 0) and band.outside <= mask.BLOCKED
    same = isinstance(band, mask.Band) and (band.documents is keep.documents or match.same(band.documents, keep.documents))
    if not blocking or not same or (keep.inside, keep.outside) != (1, 0) or not keep.low <= 0 <= keep.high or match.value(n).shape[-1] != match.value(n).shape[-2]:
        return None
    return _extended(_product(inner, depth - 1), n)


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
