"""Squared ReLU and quick GELU become ``mindspeed::activation``, whose backward keeps its input alone.

``relu(x) ** 2`` in any spelling of square and relu (``clamp(min=0)``, ``maximum`` with zero, ``where``, ``relu(x) *
x``); ``x * sigmoid(1.702 x)`` in any spelling of the logistic function. Safe because the operator evaluates the same
formula in at least the same precision; where the spellings of relu differ, in the gradient at zero, that of the square
is zero. What is NaN stays NaN, as with relu (``where`` makes it zero), and minus infinity becomes zero (a product with
the mask makes it NaN).
"""

from __future__ import annotations

import functools
import math

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.activation import SLOPE
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import activations as activations_analysis
from mindspeed_fx.passes.fusion.emit import activations

NAME, OPERATOR = "fusion.activation", "mindspeed::activation"
GREATER = (aten.gt.Scalar, aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor)


@register(NAME)
def activation(gm: fx.GraphModule, context: Context) -> PassReport:
    """Squared ReLU and quick GELU become one operator."""
    report = activations.fuse(gm, NAME, OPERATOR, _quick_gelu)
    nodes = calls(gm, aten.pow.Tensor_Scalar, aten.mul.Tensor, aten.where.self, aten.where.ScalarOther)
    rewrite_each(report, OPERATOR, nodes, functools.partial(_fuse_squared_relu, gm))
    rewrite.finish(gm)
    return report


def _fuse_squared_relu(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    result = _squared_relu(node)
    if result is None:
        return None
    x, inner = result
    if reason := match.unsafe([node, *inner], [x]):
        return reason
    if match.value(x).dtype != match.value(node).dtype:
        return f"the input is {match.value(x).dtype} and the result {match.value(node).dtype}"
    new = rewrite.insert(gm, node, torch.ops.mindspeed.activation.default, (x, "squared_relu"))
    return rewrite.substitute(gm, node, new) or site(OPERATOR, node, [node, *inner])


def _quick_gelu(result: activations_analysis.SelfGated) -> tuple | None:
    quick = result.kind == "swish" and math.isclose(result.slope, SLOPE, rel_tol=1e-6)
    return (torch.ops.mindspeed.activation.default, ("quick_gelu",), {}) if quick else None


def _squared_relu(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """(x, nodes) when ``node`` is relu(x)^2: a square, or the product of relu(x) with itself or with x."""
    inner = match.match_square(node)
    if (
        (masked := _match_mask(node))
        and (x := match.match_square(match.uncast(masked[0]))) is not None
        and _step(masked[1], x) is not False
    ):
        return x, [match.uncast(masked[0])]
    pairs = [(inner, inner)] if inner is not None else match.operands(node, aten.mul.Tensor)
    for a, b in pairs:
        part = positive_part(match.uncast(a))
        if part is None:
            continue
        x, nodes, _ = part
        if match.same(a, b) or match.same(match.uncast(b), match.uncast(x)):
            return x, [n for n in (match.uncast(a), *nodes, b) if n is not x]
    return None


def positive_part(n: fx.Node) -> tuple[fx.Node, list[fx.Node], str | None] | None:
    """(x, nodes, how much of the gradient passes at x = 0 where it is some) when ``n`` is max(x, 0) in any spelling;
    relu passes none.
    """
    if not isinstance(n, fx.Node) or n.op != "call_function":
        return None
    if match.is_call(n, aten.relu.default):
        return n.args[0], [n], None
    if (
        match.is_call(n, aten.clamp_min.default, aten.clamp.default)
        and match.number(match.argument(n, "min")) == 0
        and match.argument(n, "max") is None
    ):
        return n.args[0], [n], "all"
    if match.is_call(n, aten.threshold.default) and [match.number(a) for a in n.args[1:3]] == [0, 0]:
        return n.args[0], [n], None
    for x, zero in match.operands(n, aten.maximum.default, aten.max.other):
        if match.is_zeros(zero):
            return x, [n], "half"
    x, mask = _match_mask(n) or (None, None)
    step = _step(mask, x)
    return None if step is False else (x, [n], step)


def _match_mask(n: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, condition) when ``n`` is x where a comparison holds, else zero."""
    if match.is_call(n, aten.where.self, aten.where.ScalarOther):
        return (n.args[1], n.args[0]) if match.is_zeros(n.args[2]) else None
    return next(
        ((x, _skip_casts(m)) for x, m in match.operands(n, aten.mul.Tensor) if match.is_call(_skip_casts(m), *GREATER)),
        None,
    )


def _skip_casts(n: object) -> object:
    return n.args[0] if match.is_call(n, aten.to.dtype, aten._to_copy.default) else n


def _step(n: object, x: object) -> str | None | bool:
    """False when ``n`` is not whether x is above zero; else what :func:`positive_part` says of the gradient at zero."""
    greater = match.is_call(n, *GREATER[:2])
    if not match.is_call(n, *GREATER) or not match.is_zeros(n.args[1]) or not isinstance(x, fx.Node):
        return False
    return (None if greater else "all") if match.same(match.uncast(n.args[0]), match.uncast(x)) else False
