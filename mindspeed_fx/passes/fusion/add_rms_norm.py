"""Residual addition before RMSNorm: ``s = x + residual; y = rms_norm(s)`` becomes ``mindspeed::add_rms_norm``.

The sum stays a result for whoever else reads it, the next residual most of all. Safe because it is the same sum and the
same norm; only sums of two tensors of one shape and type are taken.
"""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each
from mindspeed_fx.passes.fusion.analysis import norms as norms_analysis
from mindspeed_fx.passes.fusion.emit import norms

NAME, OPERATOR = "fusion.add_rms_norm", "mindspeed::add_rms_norm"


@register(NAME)
def add_rms_norm(gm: fx.GraphModule, context: Context) -> PassReport:
    """A residual addition and the RMSNorm of the sum become one operator."""
    report = PassReport(NAME)
    fuse = functools.partial(_fuse, gm, context)
    rewrite_each(report, OPERATOR, calls(gm, torch.ops.mindspeed.rms_norm.default), fuse)
    rewrite.finish(gm)
    return report


def _fuse(gm: fx.GraphModule, context: Context, node: fx.Node) -> Outcome:
    total = node.args[0]
    if not match.is_call(total, aten.add.Tensor) or not all(isinstance(a, fx.Node) for a in total.args):
        return norms_analysis.widened_sum(total)
    if context.left_to_inductor(NAME):
        return (
            "on cpu the code that Inductor generates for the sum and the norm was measured no slower; "
            f'put "{NAME}" in enable to fuse all the same'
        )
    fused = torch.ops.mindspeed.add_rms_norm.default
    return norms.fuse_sum(gm, node, [node.args[1]], OPERATOR, fused, (0, 2))
