"""Cosines and sines that larger tensors read are written once.

A model computes the angles of its rotations once, [seq, dim], and every layer reads them, for queries and for keys.
Inductor fuses them into whatever reads them, so that each element of every head computes its cosine and its sine
again, in every layer and in both directions. On an H200 the rotations of a Llama's layer ([2, 2048, 16 + 4 heads, 128],
bfloat16) took three times as long as their bytes do.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import inductor
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.op_sets import UNIT_DIMENSIONS, is_pointwise
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "lowering.angle_tables", "table"
LARGER = 2
"""A reader computes an element of the table again where it is at least this many times as large."""

_VIEWS = (*match.RESHAPES, *UNIT_DIMENSIONS)


@register(NAME)
def angle_tables(gm: fx.GraphModule, context: Context) -> PassReport:
    """Cosines and sines are written once where larger tensors read them, and not computed again in each element."""
    report = PassReport(NAME)
    if context.options.codegen != "inductor":
        return report.note_reason("without generated code every value is written")
    rewrite_each(report, OPERATOR, calls(gm, aten.cos.default, aten.sin.default), lambda node: _write(gm, node))
    if report.rewrites:
        recompile(gm)
    return report


def _write(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    region = [node]
    while len(region[-1].users) == 1 and _keeps_size(user := next(iter(region[-1].users)), region[-1]):
        region.append(user)
    table = region[-1]
    largest = max((_size(u) for u in _readers(table)), default=0)
    if largest < LARGER * _size(table):
        return f"nothing that reads its {_size(table)} elements is {LARGER} times as large"
    new = inductor.written(gm, table)
    table.replace_all_uses_with(new, lambda user: user is not new)
    return site(OPERATOR, new, region)


def _keeps_size(user: fx.Node, n: fx.Node) -> bool:
    """Whether ``user`` is made of ``n`` alone, element by element."""
    return (
        user.all_input_nodes == [n]
        and (match.is_call(user, *_VIEWS) or is_pointwise(user.target))
        and _size(user) == _size(n)
    )


def _readers(n: fx.Node) -> Iterator[fx.Node]:
    """What reads ``n``, also through views."""
    for user in n.users:
        yield user
        if match.is_call(user, *_VIEWS, aten.expand.default):
            yield from _readers(user)


def _size(n: fx.Node) -> int:
    """Elements of the largest tensor of ``n``."""
    return max(
        (match.hint(t.numel()) for t in pytree.tree_leaves(n.meta.get("val")) if isinstance(t, torch.Tensor)), default=0
    )
