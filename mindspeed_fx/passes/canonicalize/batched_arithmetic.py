"""Sums and products under ``torch.func.vmap`` become sums and products of whole tensors.

torch's ``associative_scan`` combines neighbours under vmap, so that a state space model whose scan is not fused holds
dozens of bodies that no pass, plan or search can read; and a call that nobody reads stays, because a graph's clean-up
takes higher-order operators for impure. Exact: over the first dimension, which every value has, the same operator works
on the same elements.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from mindspeed_fx.compat import higher_order
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.edit import release
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import associative_scan

NAME, OPERATOR = "canonicalize.batched_arithmetic", "sums and products of whole tensors"

WHOLE = {operator.mul: aten.mul.Tensor, operator.add: aten.add.Tensor}


@register(NAME)
def batched_arithmetic(gm: fx.GraphModule, context: Context) -> PassReport:
    """What vmap computes of sums and products alone is computed of the whole tensors."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, higher_order.wrap_operator()), lambda node: _rewrite(gm, node))
    rewrite.finish(gm)
    pure = higher_order.wrap_operator(), higher_order.associative_scan_operator()
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and match.is_call(node, *pure) and associative_scan.steps(node) is not None:
            inputs = node.all_input_nodes
            gm.graph.erase_node(node)
            for n in inputs:
                release(n)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    steps = associative_scan.steps(node)
    if not node.users or steps is None:
        return None
    body, *args = node.args
    graph = getattr(gm, str(body.target)).graph
    if len({match.rank(x) for x in args if isinstance(match.value(x), torch.Tensor)}) != 1:  # and sizes, of symbols
        return "values of different numbers of dimensions meet under vmap"
    values = dict(zip((n for n in graph.nodes if n.op == "placeholder"), args))
    outcome = site(OPERATOR, node, [node])
    for n, sources in steps:
        values[n] = (
            rewrite.insert(gm, node, WHOLE[n.target], tuple(values[x] for x in sources))
            if n.target in WHOLE
            else values[sources[0]]
        )
    results = graph.output_node().args[0]
    for user in list(node.users):
        user.replace_all_uses_with(values[results[user.args[1]]])
    return outcome
