"""SiLU written out in elementary functions becomes ``aten.silu``.

``x * sigmoid(x)``, ``x / (1 + exp(-x))``, ``x / 2 * (1 + tanh(x / 2))``, factors in any order and association. Its
backward keeps x alone, and what looks for a SiLU (SwiGLU most of all) finds it. Safe because it is the same formula.
"""

from __future__ import annotations

import math

import torch.fx as fx

from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.fusion.emit import activations

NAME, OPERATOR = "canonicalize.silu", "aten::silu"


@register(NAME)
def silu(gm: fx.GraphModule, context: Context) -> PassReport:
    """SiLU in elementary functions becomes aten.silu."""
    return activations.fuse(
        gm,
        NAME,
        OPERATOR,
        lambda result: (
            (aten.silu.default, (), {})
            if result.kind == "swish" and math.isclose(result.slope, 1.0, rel_tol=1e-6)
            else None
        ),
    )
