"""Indices that npu's kernels give and take as int32 are kept as int32 for the backward.

The operators say int64, as their models do; the kernels of a mixture's router and of its permutation know int32 alone.
Cast down and up again where they are made, an index costs the backward half the memory, and the casts on both sides
vanish when the operators are lowered. Safe because experts and rows of a permutation are fewer than 2^31.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph import rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "lowering.narrow_indices", "int32 indices"
MADE = (torch.ops.mindspeed.router_topk.default, torch.ops.mindspeed.moe_permute.default)
"""Operators whose second result is such an index."""


@register(NAME)
def narrow_indices(gm: fx.GraphModule, context: Context) -> PassReport:
    """Keeps a mixture's indices as int32 on npu, where the kernels make and read them so."""
    report = PassReport(NAME)
    if context.options.target != "npu" or context.options.codegen == "inductor":
        return report.note_reason("on npu alone, and where no code is generated")
    rewrite_each(report, OPERATOR, calls(gm, *MADE), lambda node: _rewrite(gm, node))
    if report.rewrites:
        recompile(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    index = next((u for u in node.users if u.target is operator.getitem and u.args[1] == 1), None)
    if index is None or not index.users:
        return None
    readers = list(index.users)
    narrow = rewrite.insert(gm, index.next, aten._to_copy.default, (index,), {"dtype": torch.int32})
    wide = rewrite.insert(gm, narrow.next, aten._to_copy.default, (narrow,), {"dtype": torch.int64})
    partitioner.mark_recompute(wide)
    for reader in readers:
        reader.replace_input_with(index, wide)
    return site(OPERATOR, index)
