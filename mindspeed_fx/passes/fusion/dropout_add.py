"""Dropout before a residual addition: ``residual + dropout(x + bias)`` becomes ``mindspeed::dropout_add``.

The operator draws what the dropout drew, at its place among the other random operators, so that a seed gives the same
mask: the result is bitwise that of the unfused model where no code is generated. Generated code, which draws numbers of
its own and adds in the same loop, keeps the dropout; so does a sum that is fused with the norm after it.
"""

from __future__ import annotations

import functools

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Outcome, PassReport, Site, calls, register, rewrite_each, site, skip
from mindspeed_fx.passes.fusion.analysis import algebra, norms

NAME, OPERATOR = "fusion.dropout_add", "mindspeed::dropout_add"
PARALLELIZED = "the model is parallelized: every rank draws what one device draws, and the operator for its part alone"


@register(NAME)
def dropout_add(gm: fx.GraphModule, context: Context) -> PassReport:
    """Bias, dropout and residual addition become one operator that draws the same numbers."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, aten.dropout.default), functools.partial(_fuse, gm, context))
    for drop in calls(gm, aten.dropout_.default, aten.native_dropout.default):
        users = (
            [u for d in (drop, *drop.users) for u in d.users]
            if drop.target is aten.native_dropout.default
            else [*drop.users, *drop.args[0].users]
        )
        if any(match.is_call(u, aten.add.Tensor) for u in users):
            report.skipped.append(
                skip(
                    OPERATOR,
                    drop,
                    "the value is dropped in place"
                    if drop.target is aten.dropout_.default
                    else "drawn by native_dropout, whose mask is a result",
                )
            )
    rewrite.finish(gm)
    return report


def _fuse(gm: fx.GraphModule, context: Context, drop: fx.Node) -> Outcome:
    root = norms.only_user(drop)
    if match.is_call(root, torch.ops.mindspeed.add_rms_norm.default, torch.ops.mindspeed.add_layer_norm.default):
        return skip(OPERATOR, root, "the sum is fused with the norm after it; no target has one kernel for the three")
    if match.operands(root, aten.add.Tensor):
        if context.plan:
            return skip(OPERATOR, root, PARALLELIZED)
        if context.options.codegen == "inductor" and NAME not in context.options.enable:
            reason = (
                f'generated code draws the numbers and adds in one loop; put "{NAME}" in enable to fuse all the same'
            )
            return skip(OPERATOR, root, reason)
        outcome = _rewrite(gm, drop, root)
        return skip(OPERATOR, root, outcome) if isinstance(outcome, str) else outcome
    if any(match.is_call(u, aten.add.Tensor) for u in drop.users):
        return "the dropped value is used elsewhere in the model"
    factor = algebra.linear_step(root)
    if factor and factor[2] == 0 and match.is_call(norms.only_user(root), aten.add.Tensor):
        return skip(OPERATOR, root, f"the dropped value is multiplied by {factor[1]:g} before the addition")
    return None


def _rewrite(gm: fx.GraphModule, drop: fx.Node, root: fx.Node) -> Site | str:
    residual = root.args[1] if root.args[0] is drop else root.args[0]
    if not match.is_float(residual) or any(match.value(residual).dtype != match.value(n).dtype for n in (drop, root)):
        return "what is added is of another type"
    if match.value(residual).shape != match.value(drop).shape:
        return (
            f"the summands differ in shape: {tuple(match.value(residual).shape)} and {tuple(match.value(drop).shape)}"
        )
    if drop.args[1] == 1:
        return "everything is dropped"
    before = _place(gm, drop, root, residual)
    if before is None:
        return "other random numbers are drawn between the dropout and the addition"
    x, bias, inner = _bias(drop.args[0])
    region = [root, drop, *inner]
    reason = match.unsafe(region, [x, bias, residual])
    if reason:
        return reason
    both = rewrite.insert(gm, before, torch.ops.mindspeed.dropout_add.default, (x, bias, residual, float(drop.args[1])))
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in root.meta:
            both.meta[key] = root.meta[key]
    out = rewrite.insert(gm, before, match.operator.getitem, (both, 0))
    where = site(OPERATOR, root, region)
    reason = rewrite.substitute(gm, root, out)
    gm.graph.erase_node(root)
    gm.graph.erase_node(drop)  # drawing makes it look alive
    return reason or where


def _place(gm: fx.GraphModule, drop: fx.Node, root: fx.Node, residual: fx.Node) -> fx.Node | None:
    """Where the operator draws as the dropout did: in its place if the residual exists there, else at the addition."""
    between, seen = [], False
    for n in gm.graph.nodes:
        seen = seen or n is drop
        if n is root:
            break
        if seen and n is not drop:
            between.append(n)
    if residual not in between:
        return drop
    return None if any(_draws(n) for n in between) else root


def _draws(n: fx.Node) -> bool:
    return (
        n.op == "call_function"
        and not (isinstance(n.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in n.target.tags)
        and n.target is not match.operator.getitem
    )


def _bias(n: fx.Node) -> tuple[fx.Node, fx.Node | None, list[fx.Node]]:
    """(x, bias, nodes) when ``n`` is x plus a vector that nobody else reads, in its type; else (n, None, [])."""
    for x, arg in match.operands(n, aten.add.Tensor) if len(n.users) == 1 else []:
        vector = arg.args[0] if match.is_call(arg, aten.expand.default, aten.expand_as.default) else arg
        if match.is_float(x) and match.is_float(vector) and match.value(x).shape == match.value(n).shape:
            if (
                norms.is_vector(vector, match.value(n).shape[-1])
                and match.value(x).dtype == match.value(vector).dtype == match.value(n).dtype
            ):
                return x, vector, [n, arg] if arg is not vector else [n]
    return n, None, []
