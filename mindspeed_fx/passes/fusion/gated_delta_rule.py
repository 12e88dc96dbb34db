"""A gated delta rule computed chunk by chunk becomes ``mindspeed::gated_delta_rule``.

Matched by meaning: two solutions of one unit triangular system, the line of states that goes through all chunks of
them, and what each value is made of, in any association of its products; q and k normalized or not, with heads repeated
or not; the last chunk padded with zeros. Safe because the operator computes the same products in at least the precision
of the model. Sequences of one chunk too, if their state is computed.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.fusion.emit.delta_rule import fuse

NAME = "fusion.gated_delta_rule"


@register(NAME)
def gated_delta_rule(gm: fx.GraphModule, context: Context) -> PassReport:
    """The gated delta rule, unrolled chunk by chunk, becomes one operator."""
    return fuse(gm, NAME, torch.ops.mindspeed.gated_delta_rule.default, by_channel=False)
