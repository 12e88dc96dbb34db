"""What stands before the softmax of an attention: the product q k^T, through scales, casts, views, masks, soft-caps and
sinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.layout import before_copy, is_transpose
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis import kv_heads, mask, positions
from mindspeed_fx.passes.fusion.analysis.bands import BLOCKED, Band
from mindspeed_fx.passes.fusion.analysis.softmax import match_shift

Readable = fx.Node | NewCall


@dataclass
class Scores:
    """What stands before the softmax; operands and masks may be calls that are not in the graph yet."""

    q: Readable
    k_transposed: Readable
    scale: float
    masks: list[tuple[str, Readable, fx.Node]] = field(default_factory=list)
    """(kind, mask, where it is applied)"""
    region: list[fx.Node] = field(default_factory=list)
    softcap: float = 0.0
    sinks: Readable | None = None
    causal: bool = False
    """Causal besides what ``masks`` say."""
    drop: fx.Node | None = None
    """The dropout of the weights, or the call that drops them itself."""
    p: float = 0.0
    moved: bool = False
    """Something of one number per row was subtracted, which a softmax does not see."""
    cleared: bool = False
    """The weights are set to zero where the scores are masked."""

    @property
    def product(self) -> fx.Node:
        """Where the scores are multiplied, from which reading starts."""
        return self.region[0]

    @property
    def blocking(self) -> list[tuple[str, Readable, fx.Node]]:
        """The masks, without those that add zero."""
        return [arg for arg in self.masks if arg[0] != "add" or positions.meaning(arg[1]) != 0]


def with_sinks(n: Any) -> Scores | None:
    """:func:`_product`, where a column of one score per head may be joined."""
    if match.is_call(n, aten.to.dtype):
        return _extend(with_sinks(n.args[0]), n)
    if (
        not match.is_call(n, aten.cat.default)
        or len(n.args[0]) != 2
        or match.argument(n, "dim", 0) % match.value(n).dim() != match.value(n).dim() - 1
    ):
        return _product(n)
    scores, column = _product(n.args[0][0]), match.uncast(n.args[0][1])
    if scores is not None and scores.moved:
        raise Miss("a number of each row is subtracted from the scores, and not from the sinks beside them")
    heads_of = match.value(n).shape[1] if match.value(n).dim() == 4 else None
    if (
        scores is not None
        and match.value(n).dim() == 4
        and list(match.value(column).shape) == [*match.value(n).shape[:-1], 1]
        and not match.is_call(column, aten.expand.default)
    ):
        scores.sinks = NewCall(n, aten.squeeze.dim, column, -1)  # a sink of its own for each query
        return _extend(scores, n)
    column = kv_heads.source_of(column, aten.expand.default, aten.to.dtype)
    lined_up = list(match.value(column).shape) == [1, heads_of, 1, 1]
    column = kv_heads.source_of(column, *match.RESHAPES, aten.unsqueeze.default)
    if scores is None or not lined_up or list(match.value(column).shape) != [heads_of]:
        return None
    scores.sinks = column
    return _extend(scores, n)


def culprit(n: Any, depth: int = 12) -> str | None:
    """The operator between the softmax and a product of two activations that no rule covers; None without such a
    product.
    """
    if not depth or not isinstance(n, fx.Node) or n.op != "call_function":
        return None
    if match.is_call(
        n, aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default, aten.tensordot.default
    ):
        return str(n.target)
    if (
        match.is_call(n, aten.sum.dim_IntList)
        and match.is_call(n.args[0], aten.mul.Tensor)
        and all(match.is_float(a) and match.value(a).shape != match.value(n.args[0]).shape for a in n.args[0].args)
    ):
        return "they are summed over products of single elements; a product of matrices (q @ k.mT) is"
    below = next((result for a in n.all_input_nodes if match.is_float(a) and (result := culprit(a, depth - 1))), None)
    if (
        match.is_call(n, aten.mul.Tensor)
        and match.is_float(n.args[0])
        and match.is_float(n.args[1])
        and below is not None
    ):
        return (
            "they are multiplied by a tensor, which is no mask unless its zeros and ones are known while "
            "compiling: "
            "made of a boolean tensor, or of positions; a scale has one element for all keys"
        )
    known = (
        match.is_call(
            n,
            aten.to.dtype,
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten.where.self,
            *match.RESHAPES,
            *match.ADD,
        )
        or match.unscale(n)[0] is not n
    )
    return below if known or below is None or below.startswith("they ") else f"{n.target} ({n.name})"


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
    if (plain := before_copy(n)) is not n or match.is_call(n, aten.clone.default):
        return _extend(_product(n.args[0] if plain is n else plain, depth - 1), n)
    if is_transpose(n):
        return _extend(_match_transpose(_product(n.args[0], depth - 1), n), n)
    inner, factor = match.unscale(n)
    if match.is_call(inner, aten.tanh.default) and factor > 0:
        return _match_softcap(_product(inner.args[0], depth - 1), n, inner, factor)
    if inner is not n:
        scores = _product(inner, depth - 1)
        if scores:
            scores.masks = [
                (
                    kind,
                    # an additive mask that the scores had when they were scaled
                    NewCall(n, aten.mul.Tensor, m, factor) if kind == "add" and mask.kept_band(m, kind) is None else m,
                    where,
                )
                for kind, m, where in scores.masks
            ]
        if scores and scores.softcap:
            raise Miss("the scores are scaled after the soft-cap")
        return _extend(scores, n, factor=factor)
    if match.is_call(n, aten.to.dtype) or (
        match.is_call(n, *match.RESHAPES) and match.value(n).shape[-2:] == match.value(n.args[0]).shape[-2:]
    ):
        return _extend(_product(n.args[0], depth - 1), n)
    if match.is_call(n, *match.RESHAPES):
        return _match_added_in_space(n, depth)
    if match.is_call(n, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and mask.blocks(n.args[2]):
        return _extend(_product(n.args[0], depth - 1), n, ("drop", n.args[1]))
    if match.is_call(n, aten.where.self, aten.where.ScalarOther) and mask.blocks(n.args[2]):
        return _extend(_product(n.args[1], depth - 1), n, ("keep", n.args[0]))
    if match.is_call(n, aten.where.self, aten.where.ScalarSelf) and mask.blocks(n.args[1]):
        return _extend(_product(n.args[2], depth - 1), n, ("drop", n.args[0]))
    if (scores := _match_lower_bound(n, depth)) is not None:
        return scores
    for a, b in match.operands(n, *match.ADD):
        if match.number(b) == 0:
            return _extend(_product(a, depth - 1), n)
        if match.is_float(b) and (scores := _match_gated_mask(a, b, depth)) is not None:
            return _extend(scores, n)
        scores = _product(a, depth - 1) if match.is_float(b) else None
        if scores is not None:
            return _extend(scores, n, ("add", b))
    if (scores := _scaled_by_tensor(n, depth)) is not None:
        return scores
    if match.is_call(n, aten.sub.Tensor) and not n.kwargs and match.is_float(n.args[1]):
        if match_shift(n, -1) and (scores := _product(n.args[0], depth - 1)) is not None:
            scores.moved = True
            return _extend(scores, n)
        scores = _match_gated_mask(n.args[0], n.args[1], depth, -1.0)
        if scores is not None:
            return _extend(scores, n)
        scores = _product(n.args[0], depth - 1)
        return scores and _extend(scores, n, ("add", NewCall(n, aten.neg.default, n.args[1])))
    return None


def _match_transpose(scores: Scores | None, n: fx.Node) -> Scores | None:
    """The scores of every key for every query, [keys, queries], the other way round."""
    if scores is None or scores.masks or scores.softcap or scores.moved:
        return None
    scores.q, scores.k_transposed = (NewCall(n, aten.transpose.int, x, -2, -1) for x in (scores.k_transposed, scores.q))
    return scores


def _match_added_in_space(n: fx.Node, depth: int) -> Scores | None:
    """Scores that are viewed with the height and width of queries and keys while something is added, [..., height,
    width, height, width], and back (SAM, ViTDet): as added to the scores as they were.
    """
    shape, added, region, x = list(match.value(n).shape), [], [n], n.args[0]
    while not match.is_call(x, *match.RESHAPES):
        pair = next((p for p in match.operands(x, *match.ADD) if _leads_to_view(p[0], shape)), None)
        if pair is None or not match.is_float(pair[1]):
            return None
        region.append(x)
        x, other = pair
        added.append(other)
    if list(match.value(x.args[0]).shape) != shape:
        return None
    scores = _product(x.args[0], depth - 1)
    if scores is not None:
        space = list(match.value(x).shape)
        for other in added:
            whole = NewCall(n, aten.expand.default, other, space)
            scores.masks.append(("add", NewCall(n, aten.reshape.default, whole, shape), n))
        scores.region += [*region, x]
    return scores


def _leads_to_view(x: Any, shape: list[Any], depth: int = 4) -> bool:
    """Whether ``x`` is a view of something of ``shape``, to which something may have been added."""
    if match.is_call(x, *match.RESHAPES):
        return list(match.value(x.args[0]).shape) == shape
    return depth > 0 and any(_leads_to_view(a, shape, depth - 1) for a, _ in match.operands(x, *match.ADD))


def _match_lower_bound(n: fx.Node, depth: int) -> Scores | None:
    """max(scores, a number that blocks) (XGLM): nothing but what is masked is so low, and every row keeps its own
    key.
    """
    pairs = (
        [(n.args[0], match.argument(n, "min"))]
        if match.is_call(n, aten.clamp_min.default)
        else match.operands(n, aten.maximum.default, aten.max.other)
    )
    result = next(((x, least) for x, b in pairs if (least := match.number(b)) is not None and least <= BLOCKED), None)
    scores = _product(result[0], depth - 1) if result else None
    if scores is None:
        return None
    if not all(mask.keeps_own_key(kind, m, n) for kind, m, _ in scores.masks):
        raise Miss("the scores are bounded from below, and a mask may hide a whole row")
    return _extend(scores, n)


def _scaled_by_tensor(n: fx.Node, depth: int) -> Scores | None:
    """scores times, or divided by, a tensor of one element for all keys, which scales the queries instead: trained or
    not, for each head or for all.
    """
    if not match.is_call(n, aten.mul.Tensor, aten.div.Tensor) or n.kwargs:
        return None
    for x, factor in match.operands(n, aten.mul.Tensor) or [n.args]:
        if not (match.is_float(x) and match.is_float(factor)) or match.value(x).shape != match.value(n).shape:
            continue
        shape = match.value(factor).shape
        if len(shape) and not symbols.statically_known_true(shape[-1] == 1):
            continue
        scores = _product(x, depth - 1)
        if scores is None:
            continue
        if scores.masks or scores.softcap:
            raise Miss(
                f"the scores are scaled by a tensor ({factor.name}) after a "
                f"{'soft-cap' if scores.softcap else 'mask'}; "
                "scale them before"
            )
        q = scores.q
        if match.value(factor).numel() == 1:
            factor = NewCall(n, aten.reshape.default, factor, [])
        elif match.value(q).dim() != match.value(n).dim():
            raise Miss(
                f"the scores are scaled by a tensor {tuple(shape)} in another shape than that of the product of q and k"
            )
        scaled, dtype = NewCall(n, n.target, q, factor), match.value(q).dtype
        scores.q = scaled if match.value(scaled).dtype == dtype else NewCall(n, aten.to.dtype, scaled, dtype)
        return _extend(scores, n)
    return None


def _match_gated_mask(n: Any, bias: fx.Node, depth: int, sign: float = 1.0) -> Scores | None:
    """scores * keep, to which ``sign * bias`` adds a number that blocks wherever ``keep``, zero or one, is zero (GPT):
    what is masked is where it is zero.
    """
    for a, keep in match.operands(n, aten.mul.Tensor):
        if not (match.is_float(a) and match.is_float(keep)) or not mask.binary(keep):
            continue
        if mask.kept_band(keep, "keep") is not None and not mask.keeps_own_key("keep", keep, n):
            continue  # a row without any key of its own would see all of them
        line = _line(bias, keep)
        if line is None or sum(line) or sign * line[1] > BLOCKED:
            continue
        scores = _product(a, depth - 1)
        if scores is not None:
            return _extend(scores, n, ("keep", NewCall(n, aten.to.dtype, keep, torch.bool)))
    return None


def _line(n: Any, x: fx.Node, depth: int = 8) -> tuple[float, float] | None:
    """(a, b) when ``n`` is a * x + b, where x is zero or one."""
    n = match.uncast(n)
    if match.same(n, match.uncast(x)):
        return 1.0, 0.0
    band, own = positions.meaning(n), positions.meaning(x)
    if isinstance(band, (int, float)):
        return 0.0, float(band)
    if (
        isinstance(band, Band)
        and isinstance(own, Band)
        and own.inside != own.outside
        and (band.low, band.high) == (own.low, own.high)
    ):
        if band.documents is own.documents or match.same(band.documents, own.documents):
            slope = (band.inside - band.outside) / (own.inside - own.outside)
            return slope, band.inside - slope * own.inside
    inner, factor = match.unscale(n)
    if inner is not n:
        result = _line(inner, x, depth - 1) if depth else None
        return result and (result[0] * factor, result[1] * factor)
    if not depth or not match.is_call(n, *match.ADD, aten.sub.Tensor, aten.rsub.Scalar, aten.neg.default) or n.kwargs:
        return None
    if n.target is aten.neg.default:
        result = _line(n.args[0], x, depth - 1)
        return result and (-result[0], -result[1])
    a, b = (_line(y, x, depth - 1) if isinstance(y, fx.Node) else (0.0, float(y)) for y in n.args)
    signs = (1, -1) if n.target is aten.sub.Tensor else (-1, 1) if n.target is aten.rsub.Scalar else (1, 1)
    return a and b and (signs[0] * a[0] + signs[1] * b[0], signs[0] * a[1] + signs[1] * b[1])


def _match_softcap(scores: Scores | None, n: fx.Node, tanh: fx.Node, cap: float) -> Scores | None:
    """cap * tanh(scores), where the scores were divided by the cap."""
    if scores is None:
        return None
    if scores.moved:
        raise Miss("a number of each row is subtracted from the scores before a soft-cap")
    if scores.softcap or scores.masks:
        raise Miss("a soft-cap after a mask or another soft-cap")
    scores.softcap, scores.scale = cap, scores.scale * cap
    return _extend(_extend(scores, tanh), n)


def _extend(
    scores: Scores | None, n: fx.Node, arguments: tuple[str, Readable] | None = None, factor: float = 1.0
) -> Scores | None:
    if scores is not None:
        scores.region.append(n)
        scores.scale *= factor
        if arguments:
            scores.masks.append((*arguments, n))
    return scores
