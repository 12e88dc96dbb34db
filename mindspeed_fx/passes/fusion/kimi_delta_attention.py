"""Kimi Delta Attention computed chunk by chunk becomes ``mindspeed::kimi_delta_attention``.

Matched as ``fusion.gated_delta_rule`` matches, where the products of the system are sums over channels that decay each
by itself. Safe because the operator computes the same sums in at least the precision of the model, and none of it
overflows that does not overflow there.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, calls, register, rewrite_each
from mindspeed_fx.passes.fusion.analysis.delta_rule import is_by_channel, is_unit_triangular
from mindspeed_fx.passes.fusion.emit.delta_rule import replace

NAME, OPERATOR = "fusion.kimi_delta_attention", "mindspeed::kimi_delta_attention"
SETTINGS = ("scale", "norm_eps")


@register(NAME)
def kimi_delta_attention(gm: fx.GraphModule, context: Context) -> PassReport:
    """Kimi Delta Attention, unrolled chunk by chunk, becomes one operator."""
    report = PassReport(NAME)
    target = torch.ops.mindspeed.kimi_delta_attention.default
    solutions = (
        n for n in calls(gm, aten.linalg_solve_triangular.default) if is_unit_triangular(n) and is_by_channel(n)
    )
    rewrite_each(report, OPERATOR, solutions, lambda node: replace(gm, node, target, SETTINGS))
    rewrite.finish(gm)
    return report
