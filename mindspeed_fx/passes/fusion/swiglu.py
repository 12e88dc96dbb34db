"""SwiGLU: ``silu(gate) * up`` becomes ``mindspeed::swiglu``.

Gate and up may be two tensors (two linears) or the halves of one (chunk, split, slices); silu may be spelled
``silu(x)``, ``x * sigmoid(x)`` or ``x / (1 + exp(-x))``. Two halves in the order [gate | up] use the packed form, whose
gradient is one tensor. Safe because the operator evaluates the same formula in at least the same precision.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.swiglu", "mindspeed::swiglu"


@register(NAME, stage="captured", level=1, after=("plain functions",))
def swiglu(gm: fx.GraphModule, context: Context) -> PassReport:
    """silu(gate) * up becomes one operator."""
    report = PassReport(NAME)
    for node in calls(gm, aten.mul.Tensor):
        for activated, up in match.operands(node, aten.mul.Tensor):
            gate = _silu(match.uncast(activated))
            if gate is not None and isinstance(up, fx.Node) and up is not gate:
                reason = _rewrite(gm, report, node, activated, gate, up)
                if reason:
                    report.skipped.append(skip(OPERATOR, node, reason))
                break
    match.finish(gm)
    return report


def _silu(n: fx.Node) -> fx.Node | None:
    """x when ``n`` is x * sigmoid(x)."""
    if match.is_call(n, aten.silu.default):
        return n.args[0]
    for x, s in match.operands(n, aten.mul.Tensor):
        if match.is_call(s, aten.sigmoid.default) and match.same(s.args[0], x):
            return x
    if match.is_call(n, aten.div.Tensor) and isinstance(n.args[1], fx.Node):
        plus = match.plus_number(n.args[1])
        if plus and plus[1] == 1 and match.is_call(plus[0], aten.exp.default) and match.is_call(plus[0].args[0], aten.neg.default):
            return n.args[0] if match.same(plus[0].args[0].args[0], n.args[0]) else None
    return None


def _rewrite(gm: fx.GraphModule, report: PassReport, root: fx.Node, activated: fx.Node, gate: fx.Node, up: fx.Node) -> str | None:
    if not match.is_float(up):
        return f"up is not a floating-point tensor but {match.value(up)}"
    shapes = [tuple(match.value(n).shape) for n in (gate, up)]
    if shapes[0] != shapes[1]:
        return f"gate and up have different shapes, {shapes[0]} and {shapes[1]}"
    narrow = match.uncast(gate)
    if match.value(narrow).dtype == match.value(up).dtype == match.value(root).dtype:
        gate = narrow  # computed in float32 inside the operator
    region = [root, activated, match.uncast(activated)]
    reason = match.unsafe(region, [gate, up])
    if reason:
        return reason
    new = match.insert(gm, root, torch.ops.mindspeed.swiglu.default, _inputs(gate, up))
    if match.value(new).dtype != match.value(root).dtype:
        gm.graph.erase_node(new)
        return f"gate and up give {match.value(new).dtype}, the model goes on in {match.value(root).dtype}"
    report.rewrites.append(site(OPERATOR, root, region))
    return match.substitute(gm, root, new)


def _inputs(gate: fx.Node, up: fx.Node) -> tuple[fx.Node, ...]:
    a, b = match.part(gate), match.part(up)
    if a and b and match.same(a.source, b.source) and a.step == b.step == 1 and a.dim == b.dim == match.value(a.source).dim() - 1:
        if a.start == 0 and a.stop == b.start and b.stop == match.value(a.source).shape[-1] and a.stop == b.stop - b.start:
            return (a.source,)
    return gate, up
