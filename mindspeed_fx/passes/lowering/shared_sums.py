"""Equal 16-bit sums become one sum and its copies.

Two layers whose results are added have biases with one gradient (attention and MLP side by side in GPT-NeoX);
AOTAutograd keeps its sums apart, for each is an output. Inductor (torch 2.13) puts both into one loop of C++ and
declares the sum's 16-bit value twice in it, which does not compile. Without generated code nothing is wrong, and
nothing is rewritten.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.graph import rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site

NAME = "lowering.shared_sums"
NARROW = (torch.bfloat16, torch.float16)


@register(NAME)
def shared_sums(gm: fx.GraphModule, context: Context) -> PassReport:
    """Computes equal 16-bit sums once on CPU, since Inductor's C++ for two of them does not compile."""
    report = PassReport(NAME)
    if context.options.codegen != "inductor" or context.options.target != "cpu":
        return report.note_reason("only generated C++ declares a sum twice")
    first: dict[str, fx.Node] = {}
    for node in calls(gm, aten.sum.dim_IntList, aten.sum.default):
        if node.meta["val"].dtype not in NARROW:
            continue
        same = first.setdefault(str((node.target, node.args, node.kwargs)), node)
        if same is node:
            continue
        copy = rewrite.insert(gm, node, aten.clone.default, (same,))
        node.replace_all_uses_with(copy)
        gm.graph.erase_node(node)
        report.rewrites.append(site("sum", copy, [node]))
    if report.rewrites:
        recompile(gm)
    return report
