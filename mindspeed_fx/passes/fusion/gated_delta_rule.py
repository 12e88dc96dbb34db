"""A gated delta rule computed chunk by chunk becomes ``mindspeed::gated_delta_rule``.

Matched by meaning: two solutions of one unit triangular system, the line of states that goes through all chunks of
them, and what each value is made of, in any association of its products; q and k normalized or not, with heads repeated
or not; the last chunk padded with zeros. Safe because the operator computes the same products in at least the precision
of the model. Sequences of one chunk too, if their state is computed.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, calls, register, rewrite_each
from mindspeed_fx.passes.fusion.analysis.delta_rule import is_by_channel, is_unit_triangular
from mindspeed_fx.passes.fusion.emit.delta_rule import replace

NAME, OPERATOR = "fusion.gated_delta_rule", "mindspeed::gated_delta_rule"
SETTINGS = ("scale", "norm_eps", "chunk")


@register(NAME)
def gated_delta_rule(gm: fx.GraphModule, context: Context) -> PassReport:
    """The gated delta rule, unrolled chunk by chunk, becomes one operator."""
    report = PassReport(NAME)
    target = torch.ops.mindspeed.gated_delta_rule.default
    solutions = (
        n for n in calls(gm, aten.linalg_solve_triangular.default) if is_unit_triangular(n) and not is_by_channel(n)
    )
    rewrite_each(report, OPERATOR, solutions, lambda node: replace(gm, node, target, SETTINGS))
    rewrite.finish(gm)
    return report
