"""GELU written out in elementary functions becomes ``aten.gelu``.

The tanh form ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` of GPT-2 and the normal distribution's ``x * Phi(x)``
by erf, erfc or ndtr, factors in any order and association. Every target has a kernel for the operator, forward and
backward, and its backward keeps x alone. Safe because it is the same formula. Other arguments of tanh or erf are near
misses.
"""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.fusion.emit import activations

NAME, OPERATOR = "canonicalize.gelu", "aten::gelu"
APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh", "": ""}


@register(NAME)
def gelu(gm: fx.GraphModule, context: Context) -> PassReport:
    """GELU in elementary functions becomes aten.gelu."""
    return activations.fuse(
        gm,
        NAME,
        OPERATOR,
        lambda result: (
            (aten.gelu.default, (), {"approximate": APPROXIMATE[result.kind]}) if result.kind in APPROXIMATE else None
        ),
    )
