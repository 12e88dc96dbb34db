"""On cpu, masks that the backward reads are saved as bytes: see :mod:`mindspeed_fx.partition.masks`."""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.partition.masks import is_mask
from mindspeed_fx.passes.base import Context, PassReport, register

NAME = "lowering.saved_masks"


@register(NAME)
def saved_masks(gm: fx.GraphModule, context: Context) -> PassReport:
    """Names the masks that are saved as bytes, of those that the forward saves."""
    report = PassReport(NAME)
    if (context.options.target, context.options.codegen) != ("cpu", "inductor"):
        return report.note_reason("bools are slow in code that Inductor generates for the CPU alone")
    report.masks = [n.name for n in gm.graph.nodes if is_mask(n)]
    return report
