"""SwiGLU: ``silu(gate) * up`` becomes ``mindspeed::swiglu``.

Gate and up may be two tensors (two linears) or the halves of one (chunk, split, slices); silu may be spelled
``silu(x)``, ``x * sigmoid(x)`` or ``x / (1 + exp(-x))``. Two halves in the order [gate | up] use the packed form, whose
gradient is one tensor. Safe because the operator evaluates the same formula in at least the same precision.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.fusion import gate, match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.swiglu", "mindspeed::swiglu"


@register(NAME, stage="captured", level=1, after=("plain functions", "clipped_swiglu"), provides=("swiglu",))
def swiglu(gm: fx.GraphModule, context: Context) -> PassReport:
    """silu(gate) * up becomes one operator."""
    return gate.fuse(gm, NAME, OPERATOR, _silu, torch.ops.mindspeed.swiglu.default)


def _silu(n: fx.Node) -> tuple[fx.Node, tuple] | None:
    """(x, ()) when ``n`` is x * sigmoid(x)."""
    if match.is_call(n, aten.silu.default):
        return n.args[0], ()
    for x, s in match.operands(n, aten.mul.Tensor):
        if match.is_call(s, aten.sigmoid.default) and match.same(s.args[0], x):
            return x, ()
    if match.is_call(n, aten.div.Tensor) and isinstance(n.args[1], fx.Node):
        plus = match.plus_number(n.args[1])
        if plus and plus[1] == 1 and match.is_call(plus[0], aten.exp.default) and match.is_call(plus[0].args[0], aten.neg.default):
            return (n.args[0], ()) if match.same(plus[0].args[0].args[0], n.args[0]) else None
    return None
