"""On npu ``mindspeed::dropout_add`` becomes ``mindspeed::dropout_add_seeded``: two drawn numbers and a mask that is
never stored.

torch_npu's ``native_dropout`` keeps its mask as bits, eight elements in a byte (its own meta kernels say so; ATen's,
which graphs are made with, say one bool each), so that what reads the mask of a graph must be the operator that wrote
it. The kernel draws numbers of its own, as torch_npu's attention does for its dropout.
"""

from __future__ import annotations

import functools
import operator

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.kernels.base import find
from mindspeed_fx.passes.base import Context, PassReport, Site, calls, register, rewrite_each, site

NAME, OPERATOR = "fusion.dropout_add_seeded", "mindspeed::dropout_add_seeded"


@register(NAME)
def dropout_seeded(gm: fx.GraphModule, context: Context) -> PassReport:
    """On npu, bias, dropout and residual addition draw their mask from a seed, forward and backward."""
    report = PassReport(NAME)
    if context.options.target != "npu":
        report.notes.append(f"the target is {context.options.target}, where dropout draws the model's own numbers")
        return report
    nodes = calls(gm, torch.ops.mindspeed.dropout_add.default)
    rewrite_each(report, OPERATOR, nodes, functools.partial(_rewrite, gm))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Site | str:
    x, bias, residual, p = node.args
    if not p:
        return "nothing is dropped"
    if any(user.target is operator.getitem and user.args[1] == 1 and user.users for user in node.users):
        return "the mask is used elsewhere in the model"
    like = match.value(residual)
    draws = rewrite.insert(
        gm,
        node,
        torch.ops.aten.randint.default,
        (2**31 - 1, [2]),
        {"dtype": torch.int32, "device": like.device, "pin_memory": False},
    )
    args = (x, bias, residual, draws, p)
    _, reasons = find(torch.ops.mindspeed.dropout_add_seeded.default).choose(
        "npu", *fx.map_arg((args, {}), match.value)
    )
    if reasons:
        gm.graph.erase_node(draws)
        return reasons[0]
    new = rewrite.insert(gm, node, torch.ops.mindspeed.dropout_add_seeded.default, args)
    new.meta.update({k: node.meta[k] for k in ("nn_module_stack", "stack_trace", "source_fn_stack") if k in node.meta})
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(new)
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return site(OPERATOR, node, [node])
