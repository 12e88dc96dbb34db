"""Kimi Delta Attention computed chunk by chunk becomes ``mindspeed::kimi_delta_attention``.

Matched as ``fusion.gated_delta_rule`` matches, where the products of the system are sums over channels that decay each
by itself. Safe because the operator computes the same sums in at least the precision of the model, and none of it
overflows that does not overflow there.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.fusion.emit.delta_rule import fuse

NAME = "fusion.kimi_delta_attention"


@register(NAME)
def kimi_delta_attention(gm: fx.GraphModule, context: Context) -> PassReport:
    """Kimi Delta Attention, unrolled chunk by chunk, becomes one operator."""
    return fuse(gm, NAME, torch.ops.mindspeed.kimi_delta_attention.default, by_channel=True)
