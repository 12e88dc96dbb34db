"""Sinkhorn's algorithm, unrolled, becomes ``mindspeed::sinkhorn_knopp``.

A model with hyper-connections divides rows and columns of small matrices in turn, twenty times before every sublayer:
240 nodes, and twice as many in the backward; on cuda the kernel takes a fifth of the time of generated code
(benchmarks/results/2026-11-27-gpu_4.txt). Safe because the operator takes the same steps in at least the same
precision.
"""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels import sinkhorn_knopp as kernel
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import sinkhorn as analysis

NAME, OPERATOR = "fusion.sinkhorn_knopp", "mindspeed::sinkhorn_knopp"


@register(NAME)
def sinkhorn_knopp(gm: fx.GraphModule, context: Context) -> PassReport:
    """Divisions by sums of rows and columns in turn become one operator."""
    report = PassReport(NAME)
    look = functools.partial(_fuse, gm, context.options.target)
    rewrite_each(report, OPERATOR, list(calls(gm, aten.softmax.int)), look)
    rewrite.finish(gm)
    return report


def _fuse(gm: fx.GraphModule, target: str, node: fx.Node) -> Outcome:
    result = analysis.read(node)
    if not isinstance(result, analysis.Sinkhorn):
        return result
    if target == "cuda" and (reason := kernel.unable(match.value(result.x))):
        return f"on cuda generated code is faster than the operator without its kernel: {reason}"
    if reason := match.unsafe(result.region, [result.x]):
        return reason
    new = rewrite.insert(
        gm,
        result.last,
        torch.ops.mindspeed.sinkhorn_knopp.default,
        (result.x, result.iterations, result.eps),
    )
    where = site(OPERATOR, node, result.region)
    return rewrite.replace(gm, result.last, new) or where
