"""Mamba's selective scan, token by token or as an associative scan, becomes ``mindspeed::selective_scan``.

Matched by meaning: each state is the one before times a decay plus an input, or the stretch of tokens that each element
of an associative scan combines; decays and inputs in any association; with its skip, its gate and the softplus of its
steps where they are there. Safe because the operator computes the same sums in at least the precision of the model.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.base import find
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import selective_scan as analysis

NAME, OPERATOR = "fusion.selective_scan", "mindspeed::selective_scan"


@register(NAME)
def selective_scan(gm: fx.GraphModule, context: Context) -> PassReport:
    """A selective scan becomes one operator."""
    report, known = PassReport(NAME), {}
    places = list(calls(gm, aten.stack.default, aten.movedim.int))
    rewrite_each(report, OPERATOR, places, lambda node: _rewrite(gm, node, known, context.options.target))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node, known: dict, target: str) -> Outcome:
    rule = analysis.read(node, known)
    if rule is None:
        return None
    if match.is_call(node, aten.movedim.int) and (reason := _each_token_a_launch(rule, target)):
        return reason
    rows = (rule.u, rule.dt, rule.a, rule.b, rule.c)
    if reason := match.unsafe(rule.region, [*rows, rule.d, rule.z, rule.bias, rule.state]):
        return reason
    arguments = (*(rewrite.build(x) for x in rows), rule.d, rewrite.build(rule.z), rule.bias, rule.state, rule.softplus)
    both = rewrite.insert(gm, rule.first, torch.ops.mindspeed.selective_scan.default, arguments)
    out = rewrite.insert(gm, rule.first, operator.getitem, (both, 0))
    out = rewrite.insert(gm, rule.first, aten.transpose.int, (out, 1, 2)) if rule.turned else out
    outcome = site(OPERATOR, node, rule.region)
    if reason := rewrite.substitute(gm, rule.out, out):
        raise Miss(reason)
    for last in rule.final:
        rewrite.substitute(gm, last, rewrite.insert(gm, rule.first, operator.getitem, (both, 1)))
    return outcome


def _each_token_a_launch(rule: analysis.SelectiveScan, target: str) -> str | None:
    """Why an associative scan, whose depth is a logarithm, is the better one on ``target``; None where it is not."""
    if target == "cpu":
        return None
    nodes = (rule.u, rule.dt, rule.a, rule.b, rule.c, rule.d, rule.z, rule.bias, rule.state)
    values = [None if x is None else match.value(x) for x in nodes]
    overload = torch.ops.mindspeed.selective_scan.default
    kernel, reasons = find(overload).choose(target, (*values, rule.softplus), {})
    if kernel is not None:
        return None
    return f"on {target} each token's step would be a launch, and the scan stays: {'; '.join(reasons)}"
