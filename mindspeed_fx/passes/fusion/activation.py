"""Squared ReLU and quick GELU become ``mindspeed::activation``, whose backward keeps its input alone.

``relu(x) ** 2`` in any spelling of square and relu (``clamp(min=0)``, ``maximum`` with zero); ``x * sigmoid(1.702 x)``. Safe because
the operator evaluates the same formula in at least the same precision.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from mindspeed_fx.kernels.activation import SLOPE
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.activation", "mindspeed::activation"


@register(NAME, stage="captured", level=1, after=("plain functions", "swiglu"))
def activation(gm: fx.GraphModule, context: Context) -> PassReport:
    """Squared ReLU and quick GELU become one operator."""
    report = PassReport(NAME)
    for node in calls(gm, aten.pow.Tensor_Scalar, aten.mul.Tensor):
        found = _activation(node)
        if found is None:
            continue
        x, kind, inner = found
        reason = match.unsafe([node, inner], [x])
        if reason is None and match.value(x).dtype != match.value(node).dtype:
            reason = f"the input is {match.value(x).dtype} and the result {match.value(node).dtype}"
        if reason is None:
            reason = match.substitute(gm, node, match.insert(gm, node, torch.ops.mindspeed.activation.default, (x, kind)))
        if reason:
            report.skipped.append(skip(OPERATOR, node, reason))
        else:
            report.rewrites.append(site(OPERATOR, node, [node, inner]))
    match.finish(gm)
    return report


def _activation(node: fx.Node) -> tuple[fx.Node, str, fx.Node] | None:
    """(x, kind, the relu or sigmoid) when ``node`` is one of the activations."""
    inner = match.squared(node)
    if inner is not None:
        x = positive_part(match.uncast(inner))
        return None if x is None else (x, "squared_relu", match.uncast(inner))
    for x, s in match.operands(node, aten.mul.Tensor):
        if isinstance(x, fx.Node) and positive_part(x) is not None and match.same(x, s):
            return positive_part(x), "squared_relu", x
        if isinstance(x, fx.Node) and match.is_call(s, aten.sigmoid.default):
            ways = match.unscalings(s.args[0])
            if any(math.isclose(factor, SLOPE, rel_tol=1e-6) and match.same(match.uncast(scaled), match.uncast(x)) for scaled, factor in ways):
                return x, "quick_gelu", s
    return None


def positive_part(n: fx.Node) -> fx.Node | None:
    """x when ``n`` is max(x, 0), with no gradient below zero, in any spelling."""
    if match.is_call(n, aten.relu.default):
        return n.args[0]
    if match.is_call(n, aten.clamp_min.default) and n.args[1] == 0:
        return n.args[0]
    if match.is_call(n, aten.clamp.default) and match.argument(n, "min") == 0 and match.argument(n, "max") is None:
        return n.args[0]
    return None
