"""Pieces that are split along one dimension and joined along another are one transposed copy.

A value that ranks gather or scatter along a dimension other than the first is taken apart into a piece for each rank
and put together again (torch's functional collectives write it so). That is a reordering of its elements: a view, a
permutation and one copy, whose code does not grow with the number of ranks, or no copy where the dimensions between
are of one. In the joint graph, so that partitioning, overlap and code generation read three nodes for those of all
pieces. Safe because every element goes where it went.
"""

from __future__ import annotations

import operator
from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import rewrite
from mindspeed_fx.graph.edit import drop_dead
from mindspeed_fx.graph.match import argument, aten, is_call
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "lowering.split_cat", "pieces in another order"
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
OF_RESULT = ("val", "tensor_meta", "original_aten", "from_node")
"""What a node says of its own result alone; all else holds for what stands in its place."""


@register(NAME)
def split_cat(gm: fx.GraphModule, context: Context) -> PassReport:
    """Reorders by one copy what was split along one dimension and joined along another."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, aten.cat.default), lambda node: _rewrite(gm, node))
    if report.rewrites:
        drop_dead(gm)
        gm.graph.lint()
        recompile(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    value, along = _source(node.args[0])
    if value is None:
        return None
    shape = value.meta["val"].shape
    across = argument(node, "dim") % len(shape)
    if along == across:
        return None
    if sum(isinstance(size, torch.SymInt) for size in shape) > 1:
        return "several of its sizes are symbols"
    if any(symbols.is_known_by_data(size) for size in shape):
        return "data decides its sizes"
    if not node.meta["val"].is_contiguous():
        return "the joined lies in memory in another order than its dimensions'"
    new = _reordered(gm, node, value, along, across)
    node.replace_all_uses_with(new)
    return site(OPERATOR, new, [node])


def _reordered(gm: fx.GraphModule, node: fx.Node, value: fx.Node, along: int, across: int) -> fx.Node:
    """The pieces of dimension ``along`` of ``value``, one after the other along ``across``."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        new = rewrite.insert(gm, node, target, args, kwargs)
        new.meta = {**{k: v for k, v in node.meta.items() if k not in OF_RESULT}, **new.meta}
        return new

    pieces, shape = len(node.args[0]), [*value.meta["val"].shape]
    shape[along : along + 1] = [pieces, node.args[0][0].meta["val"].shape[along]]
    order = [d for d in range(len(shape)) if d != along]
    order.insert(across, along)
    divided = call(aten.view.default, value, _with_unknown(shape))
    moved = call(aten.permute.default, divided, order)
    if not moved.meta["val"].is_contiguous() or any(user.op == "output" for user in node.users):
        # an output has memory of its own
        moved = call(aten.clone.default, moved, memory_format=torch.contiguous_format)
    return call(aten.view.default, moved, _with_unknown([*node.meta["val"].shape]))


def _with_unknown(shape: list[Any]) -> list[int]:
    return [-1 if isinstance(size, torch.SymInt) else size for size in shape]


def _source(pieces: Sequence[fx.Node]) -> tuple[fx.Node | None, int]:
    """The value that ``pieces`` are all the equal pieces of, in order, and the dimension; None where they are not."""
    if len(pieces) < 2 or any(p.op != "call_function" or p.target is not pieces[0].target for p in pieces):
        return None, 0
    source = pieces[0].args[0]
    if pieces[0].target is operator.getitem and is_call(source, *SPLITS):
        whole = [p.args for p in pieces] == [(source, k) for k in range(len(source.meta["val"]))]
        value, along = source.args[0], argument(source, "dim")
    elif pieces[0].target is aten.slice.Tensor:
        value, along = source, argument(pieces[0], "dim")
        size = pieces[0].meta["val"].shape[along]
        whole = symbols.statically_known_true(value.meta["val"].shape[along] == size * len(pieces)) and all(
            p.args[0] is value
            and (argument(p, "dim"), argument(p, "start"), argument(p, "step")) == (along, k * size, 1)
            for k, p in enumerate(pieces)
        )
    else:
        return None, 0
    return (value, along % value.meta["val"].dim()) if whole else (None, 0)
