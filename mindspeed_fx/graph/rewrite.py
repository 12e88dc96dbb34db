"""Edits of a captured graph: insert a call with its fake value, replace a value by another."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, inductor
from mindspeed_fx.graph.annotate import annotate
from mindspeed_fx.graph.edit import drop_dead, release
from mindspeed_fx.graph.layout import layout_is_free
from mindspeed_fx.graph.match import hint, value
from mindspeed_fx.graph.new_call import NewCall, call_meta
from mindspeed_fx.graph.recompile import is_unchanged, leave, recompile

aten = torch.ops.aten


def insert(gm: fx.GraphModule, before: fx.Node, target: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
    """A new call before ``before`` with the same origin, fake value computed."""
    kwargs = kwargs or {}
    args = torch.utils._pytree.tree_map_only(torch.SymInt, lambda size: _size_node(gm, before, size), args)
    with gm.graph.inserting_before(before):
        new = gm.graph.call_function(target, args, kwargs)
    new.meta = call_meta(before, target, new.args, new.kwargs)
    return new


def build(x: Any) -> Any:
    """``x``, or the node of the call that a reader asked for, inserted with what it reads."""
    if not isinstance(x, NewCall):
        return x
    if x.node is None:
        args, kwargs = torch.utils._pytree.tree_map_only(NewCall, build, (x.args, x.kwargs))
        x.node = insert(x.graph.owning_module, x.before, x.target, args, kwargs)
    return x.node


def _size_node(gm: fx.GraphModule, before: fx.Node, size: torch.SymInt) -> fx.Node | int:
    """A node that holds a symbolic size: a graph cannot hold the symbol itself."""
    node = _expression_node(gm, before, size.node.expr)
    if node is None:
        raise RuntimeError(f"no value before {before.name} has the size {size}")
    return node


def _expression_node(gm: fx.GraphModule, before: fx.Node, expr: Any) -> fx.Node | int | None:
    """``expr`` as a number, as the size of a value, or as a sum or product of such."""
    if expr.is_number:
        return int(expr)
    for n in gm.graph.nodes:
        if n is before:
            break
        val = n.meta.get("val")
        if isinstance(val, torch.SymInt) and val.node.expr == expr:
            return n
        for dim, length in enumerate(val.shape if isinstance(val, torch.Tensor) else ()):
            if isinstance(length, torch.SymInt) and length.node.expr == expr:
                return _number_node(gm, before, aten.sym_size.int, (n, dim), length)
    if not (expr.is_Mul or expr.is_Add):
        return None
    function = operator.mul if expr.is_Mul else operator.add
    parts = [_expression_node(gm, before, x) for x in expr.args]
    if any(part is None for part in parts):
        return None
    result = parts[0]
    for part in parts[1:]:
        val = function(*(x.meta["val"] if isinstance(x, fx.Node) else x for x in (result, part)))
        result = _number_node(gm, before, function, (result, part), val)
    return result


def _number_node(gm: fx.GraphModule, before: fx.Node, target: Any, args: tuple, val: Any) -> fx.Node:
    with gm.graph.inserting_before(before):
        new = gm.graph.call_function(target, args)
    grad_enabled = before.meta.get("grad_enabled", True)
    new.meta = {"val": val, "mutated": False, "needs_grad": False, "grad_enabled": grad_enabled}
    return new


def replace(gm: fx.GraphModule, old: fx.Node, new: fx.Node) -> str | None:
    """:func:`substitute`, and what nobody reads any longer is gone at once, so that no later look finds the pattern
    again.
    """
    reason = substitute(gm, old, new)
    if reason is None:
        release(old)
    return reason


def substitute(gm: fx.GraphModule, old: fx.Node, new: fx.Node) -> str | None:
    """Let ``new`` stand for ``old``, with a cast or a copy where type or layout differ; the reason when it cannot."""
    a, b = value(old), value(new)
    if a.shape != b.shape:
        return f"the operator returns shape {tuple(b.shape)} where the model has {tuple(a.shape)}"
    # ``new`` may stand behind ``old``, where something it reads was made later.
    place = old if new < old else new.next
    if a.dtype != b.dtype:
        new = insert(gm, place, aten.to.dtype, (new, a.dtype))
    if (order := copy_order(old, value(new))) is not None:
        if order != list(range(a.dim())) and not inductor.view_may_leave(old):
            return "it and its detach() are both returned in an order of dimensions that torch cannot give back"
        new = packed(gm, place, new, order)
    if value(new).stride() != a.stride():
        for user in old.users:
            user.meta["fresh"] = True
    old.replace_all_uses_with(new)
    return None


def copy_order(old: fx.Node, new: torch.Tensor) -> list[int] | None:
    """The dimensions by falling stride, as the model had them, in which ``new`` must be packed to stand for ``old``;
    None where it may stay as it is.
    """
    a = value(old)
    if fake.layout(new) == fake.layout(a) or layout_is_free(old, new):
        return None
    return stored_order(a)


def stored_order(x: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, or a fake one, by falling stride."""
    return sorted(range(x.dim()), key=lambda d: (-hint(x.stride(d)), d))


def packed(gm: fx.GraphModule, place: fx.Node, x: fx.Node, order: list[int]) -> fx.Node:
    """``x`` with its elements packed in memory, its dimensions in ``order`` there, before ``place``."""
    if order == list(range(len(order))):
        return insert(gm, place, aten.contiguous.default, (x,))
    x = insert(gm, place, aten.contiguous.default, (insert(gm, place, aten.permute.default, (x, order)),))
    return insert(gm, place, aten.permute.default, (x, sorted(range(len(order)), key=order.__getitem__)))


def finish(gm: fx.GraphModule) -> None:
    """After rewriting: drop what nobody uses, bring fake values up to date, refresh the annotations. Of a graph that no
    pass has touched since it was last done there is nothing to do.
    """
    if is_unchanged(gm):
        return
    drop_dead(gm)
    fake.refresh_values(gm)
    annotate(gm)
    recompile(gm)
    leave(gm)
