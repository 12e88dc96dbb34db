"""Mamba-2's state space dual computed chunk by chunk becomes ``mindspeed::ssd``.

Matched by meaning: sums of products in any spelling (einsum, matmul, broadcast products that are summed) and
association, decays as exponentials of sums of segments; the last chunk filled with zeros or not, the skip before or
after these are cut off. Safe because the operator computes the same sums in at least the precision of the model.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import layout_is_free
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import ssd as analysis

NAME, OPERATOR = "fusion.ssd", "mindspeed::ssd"


@register(NAME)
def ssd(gm: fx.GraphModule, context: Context) -> PassReport:
    """The state space dual in chunks becomes one operator."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, aten.add.Tensor), lambda node: _rewrite(gm, node))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    rule = analysis.read(node)
    if rule is None:
        return None
    inputs = [rule.x, rule.dt, rule.a, rule.b, rule.c, rule.d, rule.state]
    if reason := match.unsafe(rule.region, inputs):
        return reason
    both = rewrite.insert(gm, rule.line, torch.ops.mindspeed.ssd.default, tuple(inputs))
    outcome = site(OPERATOR, node, rule.region)
    _substitute_result(gm, rule, rewrite.insert(gm, rule.line, operator.getitem, (both, 0)))
    if rule.final:
        _substitute_final(gm, rule, rewrite.insert(gm, rule.line, operator.getitem, (both, 1)))
    return outcome


def _substitute_result(gm: fx.GraphModule, rule: analysis.StateSpaceDual, out: fx.Node) -> None:
    old = rule.out
    if rule.padded is not None and (old is rule.padded or not layout_is_free(old, match.value(out))):
        # Who reads the result as it lies in memory finds it before tokens that fill the last chunk: they are zeros.
        old, missing = rule.padded, match.value(rule.padded).shape[1] - match.value(out).shape[1]
        out = rewrite.insert(gm, rule.line, aten.pad.default, (out, [0, 0, 0, 0, 0, missing]))
    if reason := rewrite.substitute(gm, old, out):
        raise Miss(reason)


def _substitute_final(gm: fx.GraphModule, rule: analysis.StateSpaceDual, final: fx.Node) -> None:
    if all(layout_is_free(last, match.value(final)) for last in rule.final):
        for last in rule.final:
            rewrite.substitute(gm, last, final)
        return
    # Who reads it as it lies in memory finds it behind the states that chunks begin with.
    column = rewrite.insert(gm, rule.line, aten.unsqueeze.default, (final, 1))
    before = [*[0] * 6, match.value(rule.line).shape[1] - 1, 0]
    line = rewrite.insert(gm, rule.line, aten.pad.default, (column, before))
    if reason := rewrite.substitute(gm, rule.line, line):
        raise Miss(reason)
