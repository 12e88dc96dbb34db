"""Losses that multiply with one-hot targets pick instead: ``(one_hot(t) * y).sum(-1)`` becomes ``y.gather(-1, t)``.

What is summed over the classes may be one-hot in any spelling (``one_hot``, comparison with ``arange``, a row of
``eye``, ``scatter`` into a constant), smoothed with numbers (``0.9 * one_hot + 0.1 / classes``), a mask, or an
``einsum``; a smoothed one becomes a picked value and a share of the sum of all. ``F.cross_entropy`` with such
probabilities becomes that of ``log_softmax``. Nothing is fused here: :mod:`mindspeed_fx.passes.fusion.analysis.nll`
reads what is left. Safe because the products with zero are left out of the sum, and nothing else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis import positions
from mindspeed_fx.passes.fusion.analysis.bands import Index
from mindspeed_fx.passes.fusion.analysis.one_hot import parse_einsum

ONCE = (aten.to.dtype, aten.contiguous.default, aten.clone.default, aten.detach.default)


SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.default)


NONE, MEAN, SUM = 0, 1, 2  # how ATen numbers reductions


class Distribution(NamedTuple):
    """``share`` for every class, and ``weight`` more for the one that ``target`` [...] names."""

    share: float
    weight: float
    target: fx.Node | None

    def times(self, factor: float) -> "Distribution":
        return Distribution(self.share * factor, self.weight * factor, self.target)


def distribution(n: Any, depth: int = 12) -> Distribution | None:
    """What ``n`` [..., classes] is, when it is one-hot or smoothed one-hot."""
    constant = positions.meaning(n)
    if isinstance(constant, (bool, int, float)):
        return Distribution(float(constant), 0.0, None)
    if not depth or not isinstance(n, fx.Node) or n.op != "call_function" or n.meta["mutated"] or n.meta["needs_grad"]:
        return None
    if (result := _one_hot(n)) is not None:
        return result
    if match.is_call(n, *ONCE):
        return distribution(n.args[0], depth - 1)
    if match.is_call(n, aten.logical_not.default, aten.bitwise_not.default):
        inner = distribution(n.args[0], depth - 1)
        return inner and Distribution(1 - inner.share, -inner.weight, inner.target)
    inner, factor = match.unscale(n)
    if inner is not n:
        result = distribution(inner, depth - 1)
        return result and result.times(factor)
    if match.is_call(n, *match.ADD, aten.sub.Tensor, aten.rsub.Scalar) and not n.kwargs and len(n.args) == 2:
        a, b = (distribution(x, depth - 1) for x in n.args)
        if a is None or b is None or (a.target is not None and b.target is not None):
            return None
        signs = (1, -1) if n.target is aten.sub.Tensor else (-1, 1) if n.target is aten.rsub.Scalar else (1, 1)
        a, b = a.times(signs[0]), b.times(signs[1])
        return Distribution(a.share + b.share, a.weight + b.weight, a.target if a.target is not None else b.target)
    return None


def _one_hot(n: fx.Node) -> Distribution | None:
    last = match.value(n).dim() - 1
    if match.is_call(n, aten.one_hot.default):
        return Distribution(0.0, 1.0, n.args[0]) if match.argument(n, "num_classes", -1) != -1 else None
    if match.is_call(n, aten.eq.Tensor, aten.ne.Tensor):
        for index, places in (n.args, n.args[::-1]):
            column = (
                not match.is_float(index) and match.value(index).dim() == last + 1 and match.value(index).shape[-1] == 1
            )
            if (
                column
                and positions.meaning(places) == Index(1, 0)
                and match.value(places).shape[-1] == match.value(n).shape[-1]
            ):
                return Distribution(*((0.0, 1.0) if n.target is aten.eq.Tensor else (1.0, -1.0)), index)
    if match.is_call(n, aten.index.Tensor, aten.embedding.default):
        rows = (
            n.args[1][0]
            if n.target is aten.index.Tensor and len(n.args[1]) == 1
            else n.args[1]
            if n.target is aten.embedding.default
            else None
        )
        identity = (
            match.is_call(n.args[0], aten.eye.default)
            and match.value(n.args[0]).shape[0] == match.value(n.args[0]).shape[1]
        )
        return (
            Distribution(0.0, 1.0, rows)
            if identity and isinstance(rows, fx.Node) and not match.is_float(rows)
            else None
        )
    if match.is_call(n, aten.scatter.value, aten.scatter.src) and n.args[1] % (last + 1) == last:
        base, to = _constant(n.args[0]), _constant(n.args[3])
        one = list(match.value(n.args[2]).shape) == [*match.value(n).shape[:-1], 1]
        return Distribution(base, to - base, n.args[2]) if base is not None and to is not None and one else None
    return None


def _constant(n: Any) -> float | None:
    known = positions.meaning(n)
    return float(known) if isinstance(known, (bool, int, float)) else None


def _match_weighted_sum(n: fx.Node) -> tuple[fx.Node, Distribution, list[fx.Node]] | None:
    """(y, targets, nodes) when ``n`` sums their product over the classes, and perhaps over more."""
    if n.target is aten.einsum.default:
        words = parse_einsum(n)
        if words is None or len(words[0]) != 2 or words[0][0] != words[0][1] or words[1] not in ("", words[0][0][:-1]):
            return None
        factors = [n.args[1], n.args[1][::-1]]
    else:
        inner = n.args[0]
        dims = match.argument(n, "dim") if n.target is aten.sum.dim_IntList else None
        if match.argument(n, "dtype") is not None or (
            dims and -1 not in [d if d < 0 else d - match.value(inner).dim() for d in dims]
        ):
            return None
        if (filled := _match_scatter(inner)) is not None:
            return (*filled, [inner])
        factors = match.operands(inner, aten.mul.Tensor)
    for t, y in factors:
        if (
            match.is_float(y)
            and isinstance(t, fx.Node)
            and isinstance(t.meta.get("val"), torch.Tensor)  # not a number read from one
            and match.value(t).shape == match.value(y).shape == match.value(factors[0][1]).shape
            and (result := distribution(t)) is not None
        ):
            return y, result, [n] if n.target is aten.einsum.default else [n, n.args[0]]
    return None


def _match_scatter(n: Any) -> tuple[fx.Node, Distribution] | None:
    """(y, targets) when ``n`` is y, zero but for the targets."""
    drop = keep = None
    if match.is_call(n, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and match.number(n.args[2]) == 0:
        y, drop = n.args[:2]
    elif (
        match.is_call(n, aten.where.self, aten.where.ScalarOther)
        and match.number(n.args[2]) == 0
        and match.is_float(n.args[1])
    ):
        keep, y = n.args[:2]
    else:
        return None
    result = distribution(drop if keep is None else keep)
    result = (
        Distribution(1 - result.share, -result.weight, result.target) if result is not None and keep is None else result
    )
    return (
        (y, result)
        if result is not None and match.value(keep if drop is None else drop).shape == match.value(y).shape
        else None
    )
