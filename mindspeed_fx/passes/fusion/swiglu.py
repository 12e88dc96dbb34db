"""SwiGLU: ``silu(gate) * up`` becomes ``mindspeed::swiglu``.

Gate and up may be two tensors (two linears) or the halves of one (chunk, split, slices); a SiLU written out is found by
canonicalize.silu. Two halves in the order [gate | up] use the packed form, whose gradient is one tensor. Safe because
the operator evaluates the same formula in at least the same precision.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.fusion.emit import gated

NAME, OPERATOR = "fusion.swiglu", "mindspeed::swiglu"


@register(NAME)
def swiglu(gm: fx.GraphModule, context: Context) -> PassReport:
    """silu(gate) * up becomes one operator."""
    return gated.fuse(gm, NAME, OPERATOR, _silu, torch.ops.mindspeed.swiglu.default)


def _silu(n: fx.Node) -> tuple[fx.Node, tuple] | None:
    return (n.args[0], ()) if match.is_call(n, aten.silu.default) else None
