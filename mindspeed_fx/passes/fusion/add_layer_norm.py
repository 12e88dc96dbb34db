"""Residual addition before LayerNorm: ``s = x + residual; y = layer_norm(s)`` becomes ``mindspeed::add_layer_norm``.

The sum stays a result for whoever else reads it, the next residual most of all. Safe because it is the same sum and the
same norm; only sums of two tensors of one shape and type are taken. On cpu the operator is lowered to the sum, which
generated code joins with its neighbours, and ATen's norm, so that it costs what the two cost.
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

NAME, OPERATOR = "fusion.add_layer_norm", "mindspeed::add_layer_norm"


@register(NAME)
def add_layer_norm(gm: fx.GraphModule, context: Context) -> PassReport:
    """A residual addition and the LayerNorm of the sum become one operator."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, torch.ops.mindspeed.layer_norm.default), functools.partial(_fuse, gm))
    rewrite.finish(gm)
    return report


def _fuse(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    total = node.args[0]
    if not match.is_call(total, aten.add.Tensor) or not all(isinstance(a, fx.Node) for a in total.args):
        return norms_analysis.widened_sum(total)
    fused = torch.ops.mindspeed.add_layer_norm.default
    return norms.fuse_sum(gm, node, list(node.args[1:3]), OPERATOR, fused, (0, 2, 3))
