"""The operator of a delta rule that was read from its line of states, in the place of what it was read from."""

from __future__ import annotations

import operator
from typing import Any

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.layout import layout_is_free
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Miss, Outcome, PassReport, calls, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import delta_rule, norms


def fuse(gm: fx.GraphModule, name: str, target: Any, by_channel: bool) -> PassReport:
    """Every rule of ``gm``, with gates of channels or without, becomes a call of ``target``; the report of pass
    ``name``."""
    report = PassReport(name)
    solutions = (
        n
        for n in calls(gm, aten.linalg_solve_triangular.default)
        if delta_rule.is_unit_triangular(n) and delta_rule.is_by_channel(n) == by_channel
    )
    rewrite_each(report, target._schema.name, solutions, lambda node: _replace(gm, node, target))
    rewrite.finish(gm)
    return report


def _replace(gm: fx.GraphModule, node: fx.Node, target: Any) -> Outcome:
    """The rule whose U is ``node`` becomes a call of ``target``; None where ``node`` is no U."""
    rule = delta_rule.read(node)
    if rule is None:
        return None
    inputs = [rule.q, rule.k, rule.v, rule.g, rule.beta, rule.state]
    if reason := match.unsafe(rule.region, inputs):
        return reason
    cast = _cast_of(rule)
    v = rule.v if cast is None else norms.strip_widening(rule.v)
    tensors = (rewrite.build(rule.q), rewrite.build(rule.k), v, rule.g, rule.beta, rule.state)
    settings = [a.name for a in target._schema.arguments[len(tensors) :]]
    arguments = (*tensors, *(getattr(rule, name) for name in settings))
    both = rewrite.insert(gm, rule.first, target, arguments)
    out = rewrite.insert(gm, rule.first, operator.getitem, (both, 0))
    outcome, old = site(target._schema.name, node, rule.region), rule.out
    if cast is not None:
        out, old = rewrite.insert(gm, rule.first, aten.transpose.int, (out, 1, 2)), cast
    elif rule.padded is not None and not layout_is_free(old, match.value(out)):
        # Who reads the result as it lies in memory finds it among the tokens that were added.
        missing = match.value(rule.padded).shape[2] - match.value(out).shape[2]
        out, old = rewrite.insert(gm, rule.first, aten.pad.default, (out, [0, 0, 0, missing])), rule.padded
    if reason := rewrite.substitute(gm, old, out):
        raise Miss(reason)
    if rule.final is not None:
        rewrite.substitute(gm, rule.final, rewrite.insert(gm, rule.first, operator.getitem, (both, 1)))
    for write in rule.writes:
        gm.graph.erase_node(write)
    return outcome


def _cast_of(rule: delta_rule.DeltaRule) -> fx.Node | None:
    """The result as [batch, seq, heads, v_dim] in the 16-bit type of the values, where nothing else is read of it: the
    operator then takes the values before they were widened, and rounds by itself."""
    turned = norms.only_user(rule.out)
    if not match.is_call(turned, aten.transpose.int) or {d % 4 for d in turned.args[1:]} != {1, 2}:
        return None
    cast = norms.only_user(turned)
    narrow = match.value(norms.strip_widening(rule.v)).dtype
    return cast if match.is_call(cast, aten.to.dtype) and match.value(cast).dtype == narrow else None
