"""SwiGLU times a weight per token: ``(silu(gate) * up * weight).to(dtype)`` becomes ``mindspeed::weighted_swiglu``.

The weight has one element per row, [..., 1]: the router's probabilities in Megatron's experts. It may multiply the
activated gate, up or their product. The backward keeps gate, up and the weights, not the product. Safe because the
operator evaluates the same formula in at least the same precision.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import past_copy
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion.analysis import gated as gates
from mindspeed_fx.passes.fusion.analysis import norms

NAME, OPERATOR = "fusion.weighted_swiglu", "mindspeed::weighted_swiglu"


@register(NAME)
def weighted_swiglu(gm: fx.GraphModule, context: Context) -> PassReport:
    """SwiGLU and the weight of each token become one operator."""
    report = PassReport(NAME)
    for node in calls(gm, torch.ops.mindspeed.swiglu.default):
        silu = past_copy(node)
        product = norms.only_user(silu)
        if product is None and any(
            match.is_float(w) and _per_row(w, node)
            for u in silu.users
            for v, w in match.operands(u, aten.mul.Tensor)
            if v is silu
        ):
            report.skipped.append(skip(OPERATOR, node, "the product without the weight is used elsewhere in the model"))
        product = norms.only_user(product) if match.is_call(product, aten.to.dtype) else product
        gate, up = node.args if len(node.args) > 1 else (node.args[0], None)
        result = next(
            (
                (product, up, w)
                for v, w in match.operands(product, aten.mul.Tensor)
                if match.uncast(v) is silu and match.is_float(w) and _per_row(w, node)
            ),
            None,
        )
        # Up may bear the weight: silu(gate) * (up * weight).
        inside = (
            (node, v, w)
            for v, w in match.operands(up, aten.mul.Tensor)
            if match.is_float(v)
            and match.is_float(w)
            and _per_row(w, node)
            and match.value(v).shape == match.value(node).shape
        )
        result = result or next(inside, None)
        if result is not None:
            reason = _rewrite(gm, report, node, gate, *result)
            if reason:
                report.skipped.append(skip(OPERATOR, result[0], reason))
    rewrite.finish(gm)
    return report


def _per_row(weight: fx.Node, node: fx.Node) -> bool:
    shape, whole = match.value(weight).shape, match.value(node).shape
    return len(shape) == len(whole) > 1 and shape[-1] == 1 and shape[:-1] == whole[:-1]


def _rewrite(
    gm: fx.GraphModule,
    report: PassReport,
    node: fx.Node,
    gate: fx.Node,
    product: fx.Node,
    up: fx.Node | None,
    weight: fx.Node,
) -> str | None:
    dtype = torch.promote_types(match.value(gate).dtype, match.value(gate if up is None else up).dtype)
    root = product
    if match.value(product).dtype != dtype:
        root = norms.only_user(product)
        if not match.is_call(root, aten.to.dtype) or match.value(root).dtype != dtype:
            return f"the model goes on in {match.value(product).dtype}, gate and up are {dtype}"
    region = [root, product, node] if product is not node else [root, node, node.args[1]]
    reason = match.unsafe(region, [gate, up, weight])
    if reason:
        return reason
    source = None if up is None else gates.packed_source(gate, up)
    x, up = (gate, up) if source is None else (source, None)
    new = rewrite.insert(gm, root, torch.ops.mindspeed.weighted_swiglu.default, (x, up, weight))
    report.rewrites.append(site(OPERATOR, root, region))
    return rewrite.substitute(gm, root, new)
