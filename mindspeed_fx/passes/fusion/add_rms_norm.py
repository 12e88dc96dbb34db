"""Residual addition before RMSNorm: ``s = x + residual; y = rms_norm(s)`` becomes ``mindspeed::add_rms_norm``.

The sum stays a result for whoever else reads it, the next residual most of all. Safe because it is the same sum and the
same norm; only sums of two tensors of one shape and type are taken.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.add_rms_norm", "mindspeed::add_rms_norm"


@register(NAME, stage="captured", level=1, after=("rms_norm",))
def add_rms_norm(gm: fx.GraphModule, context: Context) -> PassReport:
    """A residual addition and the RMSNorm of the sum become one operator."""
    report = PassReport(NAME)
    for node in calls(gm, torch.ops.mindspeed.rms_norm.default):
        total = node.args[0]
        if match.is_call(total, aten.add.Tensor) and all(isinstance(a, fx.Node) for a in total.args):
            if context.left_to_inductor(NAME):
                reason = f'on cpu the code that Inductor generates for the sum and the norm was measured no slower; put "{NAME}" in enable to fuse all the same'
            else:
                reason = _rewrite(gm, report, node, total)
            if reason:
                report.skipped.append(skip(OPERATOR, node, reason))
    match.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, report: PassReport, norm: fx.Node, total: fx.Node) -> str | None:
    x, residual = total.args
    if total.kwargs.get("alpha", 1) != 1:
        return f"the residual is scaled by {total.kwargs['alpha']}"
    values = [match.value(n) for n in (x, residual, total)]
    if any(v.dtype != values[2].dtype or v.shape != values[2].shape for v in values):
        return "the two summands differ in shape or type: " + ", ".join(f"{tuple(v.shape)} {v.dtype}" for v in values[:2])
    reason = match.unsafe([total, norm], [x, residual, norm.args[1]])
    if reason:
        return reason
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    weight = norm.args[1]
    # The operator stands where the sum stood, unless the weight is made later; then nobody may read the sum before it.
    if weight is None or order[weight] < order[total]:
        before = total
    elif all(order[u] >= order[norm] for u in total.users):
        before = norm
    else:
        return "the sum is used before the weight of the norm exists"
    three = match.insert(gm, before, torch.ops.mindspeed.add_rms_norm.default, (x, residual, *norm.args[1:]))
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in norm.meta:
            three.meta[key] = norm.meta[key]
    y, s = (match.insert(gm, before, match.operator.getitem, (three, i)) for i in (0, 1))
    rstd = match.insert(gm, before, match.operator.getitem, (three, 2))
    for user in list(norm.users):
        user.replace_all_uses_with(y if user.args[1] == 0 else rstd)
    report.rewrites.append(site(OPERATOR, norm, [total, norm]))
    return match.substitute(gm, total, s)
