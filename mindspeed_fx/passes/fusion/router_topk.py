"""The router of a mixture of experts becomes ``mindspeed::router_topk``.

Matched from the choice (``topk``) outward: back over the mask of groups and the bias to a softmax or a sigmoid, and on
to the weights, the scores that were chosen, their division by their sum, and a scale; or a softmax of the chosen
logits. What the model reads besides (the logits, all scores for an auxiliary loss) stays and has its own gradient. Safe
because the operator chooses among the same scores in the same precision. Where it pays: on npu two kernels stand for up
to seventeen, and the backward works on the chosen weights alone. On cpu the choice's sort is most of the time: forward
and backward of 2048 tokens with 128 and 256 experts took 0.7 to 1.0 of the time of generated code, one core, a few
milliseconds of a layer that takes hundreds.
"""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import router as analysis

NAME, OPERATOR = "fusion.router_topk", "mindspeed::router_topk"


@register(NAME)
def router_topk(gm: fx.GraphModule, context: Context) -> PassReport:
    """Scores of experts, the choice of the best and their weights become one operator."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, list(calls(gm, aten.topk.default)), functools.partial(_fuse, gm, context))
    rewrite.finish(gm)
    return report


def _fuse(gm: fx.GraphModule, context: Context, topk: fx.Node) -> Outcome:
    result = analysis.read(topk)
    if result is None:
        return None
    if context.options.target != "npu" and NAME not in context.options.enable:
        return (
            f"on {context.options.target} the sort of the choice stays and generated code joins what stands around it; "
            f'put "{NAME}" in enable to fuse all the same'
        )
    inputs = [result.logits, result.bias]
    if reason := match.unsafe(result.region, inputs):
        return reason
    logits = rewrite.build(result.logits)
    args = (logits, result.bias, result.k, result.score, result.groups, result.kept, result.best)
    new = rewrite.insert(gm, topk, torch.ops.mindspeed.router_topk.default, (*args, result.eps, result.scale))
    weights, ids = (rewrite.insert(gm, topk, match.operator.getitem, (new, i)) for i in (0, 1))
    where = site(OPERATOR, topk, result.region)
    if reason := rewrite.substitute(gm, result.weights, weights):
        return reason
    return (rewrite.substitute(gm, result.ids, ids) if result.ids is not None else None) or where
