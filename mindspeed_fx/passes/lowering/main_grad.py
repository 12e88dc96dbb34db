"""``lowering.main_grad``: weight gradients are added to Megatron's ``main_grad`` where it lies.

AOTAutograd makes of the operator that adds to an input (megatron/main_grad.py) one that makes a new buffer, which is
copied back at the end of
the graph: a copy of the float32 gradient of every weight, all of them alive at once. Each is made to write in place
again. (Inductor does the same to its graphs by itself.)
"""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.compat import auto_functionalized
from mindspeed_fx.passes.base import Context, PassReport, register
from mindspeed_fx.passes.overlap.step import write_in_place
from mindspeed_fx.training.gradient_ready import ARGUMENTS

NAME = "lowering.main_grad"


@register(NAME)
def main_grad(gm: fx.GraphModule, context: Context) -> PassReport:
    """Gradients are added to main_grad in place."""
    report = PassReport(NAME)
    calls = [n for n in gm.graph.nodes if str(auto_functionalized.mutable_operator(n)) in ARGUMENTS]
    if not calls:
        return report.note_reason("nothing is added to a main_grad in this graph")
    if context.options.codegen == "inductor":
        return report.note_reason("Inductor lets operators write in place by itself")
    write_in_place(gm, calls, _arguments, report)
    return report


def _arguments(node: fx.Node, bases: list[fx.Node]) -> tuple:
    names = ARGUMENTS[str(auto_functionalized.mutable_operator(node))]
    return (bases[node.kwargs["_main_grad_base_index"]], *(node.kwargs[name] for name in names))
