"""GeGLU, ReGLU and GLU: ``activation(gate) * up`` becomes ``mindspeed::glu``.

The activation is gelu (erf or tanh), relu or sigmoid; gate and up may be two tensors or the halves of one, as for
SwiGLU. A sigmoid or relu times something is a gated linear unit only where both come from matrix products of the same
input; other products (a router's gate, an attention gate) are left alone. Safe because the operator evaluates the same
formula in at least the same precision.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, calls, register, skip
from mindspeed_fx.passes.fusion.activation import positive_part
from mindspeed_fx.passes.fusion.emit import gated

NAME, OPERATOR = "fusion.glu", "mindspeed::glu"


@register(NAME)
def glu(gm: fx.GraphModule, context: Context) -> PassReport:
    """gelu, relu or sigmoid of a gate times up becomes one operator."""
    report = gated.fuse(
        gm, NAME, OPERATOR, _activation, torch.ops.mindspeed.glu.default, packed_up=(None,), accept=_belong
    )
    report.skipped += [
        skip(OPERATOR, node, "F.glu is one operator already, and so is its gradient")
        for node in calls(gm, aten.glu.default)
    ]
    for node in calls(gm, aten.mul.Tensor):
        for a, b in match.operands(node, aten.mul.Tensor):
            part = positive_part(match.uncast(a))
            if part is not None and part[2] and isinstance(b, fx.Node) and _belong((part[0], ("relu",)), b):
                report.skipped.append(
                    skip(
                        OPERATOR, node, f"where the gate is zero {part[2]} of the gradient passes, and none passes relu"
                    )
                )
    return report


def _activation(n: fx.Node) -> tuple[fx.Node, tuple] | None:
    if match.is_call(n, aten.gelu.default):
        return n.args[0], ("gelu_tanh" if match.argument(n, "approximate", "none") == "tanh" else "gelu",)
    part = positive_part(n)
    if part is not None and part[2] is None:
        return part[0], ("relu",)
    return (n.args[0], ("sigmoid",)) if match.is_call(n, aten.sigmoid.default) else None


def _belong(results: tuple[fx.Node, tuple], up: fx.Node) -> bool:
    arg, (activation,) = results
    if activation.startswith("gelu"):
        return True
    sources = [_projection_input(n) for n in (arg, up)]
    return None not in sources and match.same(*sources)


def _projection_input(n: fx.Node) -> fx.Node | None:
    """The input of the matrix product that ``n`` or the tensor it is a part of comes from."""
    n = match.uncast(n)
    piece = match.part(n)
    n = match.uncast(piece.source) if piece else n
    while match.is_call(n, *match.RESHAPES) or match.is_call(n, *match.ADD):
        n = match.uncast(n.args[0])
    if match.is_call(n, aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default):
        return n.args[0]
    return n.args[1] if match.is_call(n, aten.addmm.default, aten.baddbmm.default) else None
