"""``overlap.split``: where a graph communicates, the backward of a linear layer becomes two products.

``linear_backward`` makes the gradients of input and weight in one call. As two, the input's goes on to its collective and
the weight's, which nobody waits for, runs under it. The products are the same, so results are bitwise the same. (Where
Inductor generates code the operator has been inlined already.)
"""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, calls, register, site
from mindspeed_fx.passes.fusion.match import insert, value
from mindspeed_fx.passes.overlap.collectives import is_start
from mindspeed_fx.passes.overlap.cuts import Draft, dense
from mindspeed_fx.passes.overlap.graph import LARGE
from mindspeed_fx.passes.overlap.region import sized

NAME = "overlap.split"
aten = torch.ops.aten


@register(NAME, stage="partitioned", level=2, exact=True, provides=("split",))
def overlap_split(gm: fx.GraphModule, context: Context) -> PassReport:
    """Gradients of a linear layer's input and weight as two products, so that one can run under the other's collective."""
    report = PassReport(NAME)
    if not any(is_start(n) for n in gm.graph.nodes):
        return report.because("no functional collectives")
    draft = Draft(gm, {}) if len(gm.graph.nodes) > LARGE else None
    for node in calls(gm, torch.ops.mindspeed.linear_backward.default):
        grad, x, weight, needed = node.args
        put = draft if draft is not None and all(map(sized, (grad, x, weight))) else functools.partial(insert, gm)
        if not needed[0] or not (needed[1] or needed[2]):
            continue
        transposed = put(node, aten.t.default, (weight,))
        dx = put(node, torch.ops.mindspeed.linear.default, (grad, transposed))
        for user in [u for u in node.users if u.args[1] == 0]:
            user.replace_all_uses_with(dx)
            gm.graph.erase_node(user)
        rows, columns = (put(node, aten.view.default, (dense(put, node, t), [-1, value(t).shape[-1]])) for t in (grad, x))
        for user in list(node.users):
            if user.args[1] == 1 and needed[1]:
                user.replace_all_uses_with(put(node, aten.mm.default, (put(node, aten.t.default, (rows,)), columns)))
            elif user.args[1] == 2 and needed[2]:
                user.replace_all_uses_with(put(node, aten.sum.dim_IntList, (rows, [0])))
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)
        report.rewrites.append(site("two products", dx, [node]))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return report
