"""What is compared with an element picked out of itself is written to memory first.

Generated code computes 16-bit values in float32 and rounds what it writes. ``x.amax(-1)`` is written; an ``x`` that is
computed again where it is compared with it is not, so that no element is equal to the greatest: autograd divides by the
number of those that are, and the gradient of ``amax`` was NaN; the last of the best k was left out of ``x >=
x.topk(k).values[..., -1:]``. Both sides then are read from memory.
"""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.compat import inductor
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.selected import compared_with_their_own
from mindspeed_fx.passes.base import Context, PassReport, register, site

NAME, OPERATOR = "lowering.compared_elements", "written"


@register(NAME)
def compared_elements(gm: fx.GraphModule, context: Context) -> PassReport:
    """16-bit values that are compared with elements of themselves are written, and so rounded, before."""
    report = PassReport(NAME)
    if context.options.codegen != "inductor":
        return report.note_reason("without generated code every value is written")
    for value in (v for v in compared_with_their_own(gm.graph) if not inductor.is_written(v)):
        new = inductor.written(gm, value)
        value.replace_all_uses_with(new, lambda user, new=new: user is not new)
        report.rewrites.append(site(OPERATOR, new, [value]))
    if report.rewrites:
        recompile(gm)
    return report
