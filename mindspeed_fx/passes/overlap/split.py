"""``overlap.split``: where a graph communicates, the backward of a linear layer becomes two products.

``linear_backward`` makes the gradients of input and weight in one call. As two, the input's goes on to its collective
and the weight's, which nobody waits for, runs under it. The products are the same, so results are bitwise the same.
(Where Inductor generates code the operator has been inlined already.)
"""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from mindspeed_fx.graph.collectives import is_start
from mindspeed_fx.graph.match import value
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.rewrite import insert
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site
from mindspeed_fx.passes.overlap.chunking.chunk_spec import Draft, Put, dense
from mindspeed_fx.passes.overlap.chunking.region import has_static_sizes

NAME = "overlap.split"
aten = torch.ops.aten


@register(NAME)
def overlap_split(gm: fx.GraphModule, context: Context) -> PassReport:
    """Gradients of a linear layer's input and weight as two products, so that one can run under the other's
    collective.
    """
    report = PassReport(NAME)
    if not any(is_start(n) for n in gm.graph.nodes):
        return report.note_reason("no functional collectives")
    draft = Draft(gm, {})
    products: dict[fx.Node, fx.Node] = {}  # a result of the one call -> the product that makes it
    gone: list[fx.Node] = []
    for node in calls(gm, torch.ops.mindspeed.linear_backward.default):
        grad, x, weight, needed = node.args
        if not needed[0] or not (needed[1] or needed[2]):
            continue
        put = draft if all(map(has_static_sizes, (grad, x, weight))) else functools.partial(insert, gm)
        result = _products(put, node)
        products |= {user: result[user.args[1]] for user in node.users if result[user.args[1]] is not None}
        gone += [*node.users, node]
        report.rewrites.append(site("two products", result[0], [node]))
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    # all at once: each change goes through all of its arguments
    output.args = fx.map_arg(output.args, lambda n: products.get(n, n))
    for old, new in products.items():
        old.replace_all_uses_with(new)
    for node in gone:
        gm.graph.erase_node(node)
    recompile(gm)
    return report


def _products(put: Put, node: fx.Node) -> list[fx.Node | None]:
    """Gradients of input, weight and bias; None for those that are not needed, or read by nobody."""
    grad, x, weight, needed = node.args
    read = {user.args[1] for user in node.users}
    dx = put(node, torch.ops.mindspeed.linear.default, (grad, put(node, aten.t.default, (weight,))))
    rows = lambda t: put(node, aten.view.default, (dense(put, node, t), [-1, value(t).shape[-1]]))
    by_row = rows(grad) if read & {1, 2} else None
    dw = (
        put(node, aten.mm.default, (put(node, aten.t.default, (by_row,)), rows(x))) if needed[1] and 1 in read else None
    )
    return [dx, dw, put(node, aten.sum.dim_IntList, (by_row, [0])) if needed[2] and 2 in read else None]
