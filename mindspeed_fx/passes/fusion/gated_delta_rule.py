"""A gated delta rule computed chunk by chunk becomes ``mindspeed::gated_delta_rule``.

Matched by meaning: two solutions of one unit triangular system, the line of states that goes through all chunks of
them, and what each value is made of, in any association of its products; q and k normalized or not, with heads repeated
or not; the last chunk padded with zeros. Safe because the operator computes the same products in at least the precision
of the model. Sequences of one chunk too, if their state is computed.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import layout_is_free
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import gated_delta_rule as analysis
from mindspeed_fx.passes.fusion.analysis import norms

NAME, OPERATOR = "fusion.gated_delta_rule", "mindspeed::gated_delta_rule"


@register(NAME)
def gated_delta_rule(gm: fx.GraphModule, context: Context) -> PassReport:
    """The gated delta rule, unrolled chunk by chunk, becomes one operator."""
    report = PassReport(NAME)
    solutions = (n for n in calls(gm, aten.linalg_solve_triangular.default) if analysis.is_unit_triangular(n))
    rewrite_each(report, OPERATOR, solutions, lambda node: _rewrite(gm, node))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    rule = analysis.read(node)
    if rule is None:
        return None
    inputs = [rule.q, rule.k, rule.v, rule.g, rule.beta, rule.state]
    if reason := match.unsafe(rule.region, inputs):
        return reason
    cast = _cast_of(rule)
    v = rule.v if cast is None else norms.strip_widening(rule.v)
    tensors = (rewrite.build(rule.q), rewrite.build(rule.k), v, rule.g, rule.beta, rule.state)
    arguments = (*tensors, rule.scale, rule.norm_eps, rule.chunk)
    both = rewrite.insert(gm, rule.first, torch.ops.mindspeed.gated_delta_rule.default, arguments)
    out = rewrite.insert(gm, rule.first, operator.getitem, (both, 0))
    outcome, old = site(OPERATOR, node, rule.region), rule.out
    if cast is not None:
        out, old = rewrite.insert(gm, rule.first, aten.transpose.int, (out, 1, 2)), cast
    elif rule.padded is not None and not layout_is_free(old, match.value(out)):
        # Who reads the result as it lies in memory finds it among the tokens that were added.
        missing = match.value(rule.padded).shape[2] - match.value(out).shape[2]
        out, old = rewrite.insert(gm, rule.first, aten.pad.default, (out, [0, 0, 0, missing])), rule.padded
    if reason := rewrite.substitute(gm, old, out):
        raise Miss(reason)
    if rule.final is not None:
        rewrite.substitute(gm, rule.final, rewrite.insert(gm, rule.first, operator.getitem, (both, 1)))
    for write in rule.writes:
        gm.graph.erase_node(write)
    return outcome


def _cast_of(rule: analysis.GatedDeltaRule) -> fx.Node | None:
    """The result as [batch, seq, heads, v_dim] in the 16-bit type of the values, where nothing else is read of it: the
    operator then takes the values before they were widened, and rounds by itself."""
    turned = norms.only_user(rule.out)
    if not match.is_call(turned, aten.transpose.int) or {d % 4 for d in turned.args[1:]} != {1, 2}:
        return None
    cast = norms.only_user(turned)
    narrow = match.value(norms.strip_widening(rule.v)).dtype
    return cast if match.is_call(cast, aten.to.dtype) and match.value(cast).dtype == narrow else None
