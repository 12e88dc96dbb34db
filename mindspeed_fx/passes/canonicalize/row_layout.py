"""A sum of which a norm reads rows is stored by rows.

A vision model makes its tokens of a convolution's result, ``conv(x).flatten(2).transpose(1, 2)``, and every sum along
its residual stream keeps that order: the numbers of one token lie far from each other, every norm reads across the
memory, and what a fused norm returns is copied back into that order. What the first such sum is made of is therefore
copied (generated code reads it so at once), and the later ones follow it.

Safe because only strides change: what the graph returns gets back those that it had, and where a value made of the sum
is written in place, or read by a graph that the graph calls, nothing is done.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, inductor, tracing
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "canonicalize.row_layout", "rows"

NORMS = (aten.layer_norm.default, aten.rms_norm.default)
MEANS = (aten.mean.dim, aten.var.correction, aten.var_mean.correction)


@register(NAME)
def row_layout(gm: fx.GraphModule, context: Context) -> PassReport:
    """What a sum is made of that a norm reads in rows, and that lies in memory across them, is copied into rows."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, *match.ADD), lambda node: _rewrite(gm, node))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    if not _lies_across(node) or not any(_reads_rows(user, node) for user in node.users):
        return None
    if fake.has_symbols([match.value(node)]):
        return "its sizes are symbols: generated code chooses the order itself"
    if why := _refusal(node):
        return why
    output = gm.graph.output_node()
    before = {n: match.value(n) for n in output.all_input_nodes if _is_tensor(n)}
    outcome = site(OPERATOR, node, [node])
    copies = {
        a: rewrite.insert(gm, node, aten.contiguous.default, (a,)) for a in node.all_input_nodes if _lies_across(a)
    }
    for operand, copy in copies.items():
        node.replace_input_with(operand, copy)
    fake.follow_layouts(gm, set(copies.values()))
    for result, old in before.items():
        if fake.layout(match.value(result)) != fake.layout(old):
            output.replace_input_with(result, rewrite.packed(gm, output, result, rewrite.stored_order(old)))
    return outcome


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _lies_across(node: fx.Node) -> bool:
    """Whether the elements of another dimension than the last lie together (of one that is no mere repetition)."""
    if not _is_tensor(node) or match.value(node).dim() < 2:
        return False
    value: Any = match.value(node)
    strides = [fake.hint(s) for n, s in zip(value.shape, value.stride()) if fake.hint(n) > 1]
    return fake.hint(value.shape[-1]) > 1 and strides[-1] > min((s for s in strides if s), default=0)


def _reads_rows(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` is a norm of the last dimension of ``node``, or what one begins with: a mean, squares."""
    if match.is_call(user, *NORMS):
        return user.args[0] is node
    if match.is_call(user, *MEANS):
        dims = user.args[1] if len(user.args) > 1 else None
        return user.args[0] is node and dims in ([-1], [match.value(node).dim() - 1])
    squares = match.is_call(user, aten.pow.Tensor_Scalar, aten.square.default, *match.MUL, aten.to.dtype)
    return squares and any(_reads_rows(reader, user) for reader in user.users)


def _refusal(node: fx.Node) -> str | None:
    """Why the strides of ``node``, and of all that is made of it, are not to be changed."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        here = waiting.pop()
        if here in seen:
            continue
        seen.add(here)
        if here.meta.get("mutated"):
            return f"{here.name}, which is made of it, is written in place"
        if _lies_across(here) and not inductor.view_may_leave(here):
            return f"{here.name}, which is made of it, is returned with its detach()"
        if here.op == "call_function" and tracing.is_higher_order(here.target):
            return f"{here.name}, a graph of its own, reads what is made of it"
        waiting += here.users
    return None
