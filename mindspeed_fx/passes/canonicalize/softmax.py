"""Softmax, its logarithm and its log-sum-exp, written out, become ATen's, which the passes for attention and losses
read.

``exp(x - m) / exp(x - m).sum(dim)`` with any ``m`` of one number per row or none, as a quotient, as a product with the
reciprocal, or after the product with values that the weights are for; some of them set to zero first;
``exp(log_softmax(x))``; ``log(softmax(x))``, also of picked probabilities; ``log(exp(x).sum(dim))``, ``m + log(exp(x -
m).sum(dim))``; ``x - logsumexp(x)``; ``softmax(x - m)``.

Safe because each is the same function with the same gradient: a row's softmax does not change when the row is moved as
a whole, so that ``m`` and what it is made of have no part in either. In numbers ATen's is the safer one: without the
maximum, exp overflows (in float16 from 11 on).
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion.analysis.softmax import _RULES, LOG_SUM_EXP, PRODUCTS, Found

NAME = "canonicalize.softmax"


@register(NAME)
def softmax(gm: fx.GraphModule, context: Context) -> PassReport:
    """A softmax, its logarithm or its log-sum-exp that is written out becomes ATen's."""
    report, results = PassReport(NAME), {}
    for node in calls(gm, *_RULES):
        if not node.users or not match.is_float(node):
            continue
        result = _RULES[node.target](node)
        reason = (
            result
            if isinstance(result, str)
            else result
            and (
                match.unsafe([node, *result.region], [result.x, *(m for _, m in result.hidden)])
                or _rewrite(gm, node, result, results)
            )
        )
        if reason:
            report.skipped.append(skip("softmax", node, reason))
    rewrite.finish(gm)
    # One that became a part of another has no site of its own.
    report.rewrites += [result for new, result in results.items() if not new._erased]
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node, result: Found, results: dict) -> str | None:
    x, rank = result.x, match.value(result.x).dim()
    for kind, hidden in result.hidden:
        hidden = (
            hidden
            if match.value(hidden).dtype == torch.bool
            else rewrite.insert(gm, node, aten.to.dtype, (hidden, torch.bool))
        )
        hidden = rewrite.insert(gm, node, aten.logical_not.default, (hidden,)) if kind == "keep" else hidden
        x = rewrite.insert(gm, node, aten.masked_fill.Scalar, (x, hidden, -math.inf))
    if result.target is LOG_SUM_EXP:
        new = rewrite.insert(gm, node, LOG_SUM_EXP, (x, [result.dim], match.value(node).dim() == rank))
    else:
        new = rewrite.insert(gm, node, result.target, (x, result.dim))
    first = new
    for call in result.after:
        before = next(a for a in call.all_input_nodes if match.is_float(a))
        if call.target in PRODUCTS and match.value(new).dtype != match.value(before).dtype:
            new = rewrite.insert(gm, node, aten.to.dtype, (new, match.value(before).dtype))
        new = rewrite.insert(
            gm, node, call.target, tuple(new if a is before else a for a in call.args), dict(call.kwargs)
        )
    reason = rewrite.substitute(gm, node, new)
    if reason is None:
        results[first] = site(str(result.target), node, [node, *result.region])
    return reason
