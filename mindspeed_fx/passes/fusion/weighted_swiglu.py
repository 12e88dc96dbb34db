"""SwiGLU times a weight per token: ``(silu(gate) * up * weight).to(dtype)`` becomes ``mindspeed::weighted_swiglu``.

The weight has one element per row, [..., 1]: the router's probabilities in Megatron's experts. The backward keeps gate, up and the
weights, not the product. Safe because the operator evaluates the same formula in at least the same precision.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match, norms
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.weighted_swiglu", "mindspeed::weighted_swiglu"


@register(NAME, stage="captured", level=1, after=("swiglu",))
def weighted_swiglu(gm: fx.GraphModule, context: Context) -> PassReport:
    """SwiGLU and the weight of each token become one operator."""
    report = PassReport(NAME)
    for node in calls(gm, torch.ops.mindspeed.swiglu.default):
        silu = match.past_copy(node)
        product = norms.only_user(silu)
        if product is None and any(match.is_float(w) and _per_row(w, node) for u in node.users for v, w in match.operands(u, aten.mul.Tensor) if v is node):
            report.skipped.append(skip(OPERATOR, node, "the product without the weight is used elsewhere in the model"))
        product = norms.only_user(product) if match.is_call(product, aten.to.dtype) else product
        for value, weight in match.operands(product, aten.mul.Tensor):
            if match.uncast(value) is silu and match.is_float(weight) and _per_row(weight, node):
                reason = _rewrite(gm, report, node, product, weight)
                if reason:
                    report.skipped.append(skip(OPERATOR, product, reason))
                break
    match.finish(gm)
    return report


def _per_row(weight: fx.Node, node: fx.Node) -> bool:
    shape, whole = match.value(weight).shape, match.value(node).shape
    return len(shape) == len(whole) > 1 and shape[-1] == 1 and shape[:-1] == whole[:-1]


def _rewrite(gm: fx.GraphModule, report: PassReport, node: fx.Node, product: fx.Node, weight: fx.Node) -> str | None:
    dtype, root = match.value(node).dtype, product
    if match.value(product).dtype != dtype:
        root = norms.only_user(product)
        if not match.is_call(root, aten.to.dtype) or match.value(root).dtype != dtype:
            return f"the model goes on in {match.value(product).dtype}, gate and up are {dtype}"
    region = [root, product, node]
    reason = match.unsafe(region, [*node.args, weight])
    if reason:
        return reason
    up = node.args[1] if len(node.args) > 1 else None
    new = match.insert(gm, root, torch.ops.mindspeed.weighted_swiglu.default, (node.args[0], up, weight))
    report.rewrites.append(site(OPERATOR, root, region))
    return match.substitute(gm, root, new)
