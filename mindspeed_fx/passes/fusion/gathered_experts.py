"""A matrix of its own for every row, gathered by expert: ``bmm(weight[expert], x)`` -> rows sorted by expert,
``mindspeed::grouped_matmul``.

Hugging Face's "batched_mm" experts and other plain models copy each token's expert weights, [rows, n, k] numbers, and
their gradient adds those copies up again. Sorted by expert, the rows of one expert share one product and nothing is
copied but rows. Safe because the row products are the same. The experts' numbers must come from topk, sort, argmax or
the places of a maximum, which are never negative: a negative index would count from the last expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, PassReport, Site, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.moe_permute import match_repeat

NAME, OPERATOR = "fusion.gathered_experts", "mindspeed::grouped_matmul"
CHOSEN = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.max.dim, aten.min.dim)
SAME = (
    *match.RESHAPES,
    aten.clone.default,
    aten.contiguous.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.to.dtype,
)


class Rows(NamedTuple):
    """``y[i] = x[i] @ weight[expert[i]]``, or its transpose."""

    x: fx.Node
    """[rows, k]"""
    weight: fx.Node
    """[experts, k, n], or [experts, n, k] if ``transposed``."""
    expert: fx.Node
    """[rows], integers."""
    transposed: bool
    region: list[fx.Node]


@register(NAME)
def gathered_experts(gm: fx.GraphModule, context: Context) -> PassReport:
    """Products of rows with gathered matrices become one product per expert."""
    report = PassReport(NAME)
    products = calls(gm, aten.bmm.default, aten.matmul.default)
    rewrite_each(report, OPERATOR, products, lambda node: (rows := _rows(node)) and _rewrite(gm, node, rows))
    rewrite.finish(gm)
    return report


def _rows(node: fx.Node) -> Rows | None:
    """What ``node`` [rows, 1, n] or [rows, n, 1] computes, when one operand is gathered matrices and the other single
    rows.
    """
    for transposed, matrices, vectors, one in (
        (True, node.args[0], node.args[1], 2),
        (False, node.args[1], node.args[0], 1),
    ):
        gathered = _match_gather(matrices)
        if gathered is not None and match.value(vectors).dim() == 3 and match.value(vectors).shape[one] == 1:
            region = [node, matrices, vectors]
            if match.is_call(vectors, aten.unsqueeze.default) and vectors.args[1] % 3 == one:
                vectors = vectors.args[0]
            return Rows(vectors, *gathered, transposed, region)
    return None


def _match_gather(n: Any) -> tuple[fx.Node, fx.Node] | None:
    """(weight, expert) when ``n`` is weight[expert], [rows, ...] of [experts, ...] with two more dimensions."""
    result = match.indexed_rows(n)
    return result if result is not None and match.value(result[0]).dim() == 3 else None


def is_never_negative(n: fx.Node) -> bool:
    """True for positions, which topk, sort, argmax and max return, parts of them, and several beside each other."""
    while match.is_call(n, *SAME):
        n = n.args[0]
    if match.is_call(n, aten.cat.default, aten.concat.default):
        return all(map(is_never_negative, n.args[0]))
    if match.is_call(n, aten.clamp.default):
        return isinstance(match.argument(n, "min"), int) and match.argument(n, "min") >= 0
    return match.is_call(n, aten.argmax.default) or (
        match.is_call(n, match.operator.getitem) and n.args[1] == 1 and match.is_call(n.args[0], *CHOSEN)
    )


def _rewrite(gm: fx.GraphModule, node: fx.Node, result: Rows) -> Site | str:
    x, weight, expert, transposed, region = result
    if not is_never_negative(expert):
        return (
            f"the experts' numbers ({expert.name}) come from no topk, sort, argmax or maximum and may be negative, "
            "counting from the last expert"
        )
    if match.value(x).dtype != match.value(weight).dtype:
        return f"rows are {match.value(x).dtype}, matrices {match.value(weight).dtype}"
    reason = match.unsafe(region, [x, weight, expert])
    if reason:
        return reason
    ops, getitem = torch.ops.mindspeed, match.operator.getitem
    if match.value(x).dim() == 3:
        x = rewrite.insert(gm, node, aten.reshape.default, (x, [match.value(expert).shape[0], -1]))
    if transposed:
        weight = rewrite.insert(gm, node, aten.transpose.int, (weight, 1, 2))
    copies = match_repeat(x)
    both = rewrite.insert(gm, node, ops.moe_permute.default, (copies[0] if copies else x, expert))
    permuted, sorted_indices = (rewrite.insert(gm, node, getitem, (both, i)) for i in (0, 1))
    ends = insert_ends(gm, node, expert, match.value(weight).shape[0])
    product = rewrite.insert(gm, node, ops.grouped_matmul.default, (permuted, weight, ends, False))  # each row has one
    rows = rewrite.insert(gm, node, ops.moe_unpermute.default, (product, sorted_indices, None, 1))
    new = rewrite.insert(gm, node, aten.unsqueeze.default, (rows, 2 if transposed else 1))
    return rewrite.substitute(gm, node, new) or site(OPERATOR, node, region)


def insert_ends(gm: fx.GraphModule, node: fx.Node, expert: fx.Node, experts: int) -> fx.Node:
    """Where each expert's rows end: the number of rows whose expert is it or one before it."""
    numbers = rewrite.insert(
        gm,
        node,
        aten.arange.default,
        (experts,),
        {"dtype": match.value(expert).dtype, "device": match.value(expert).device},
    )
    column = rewrite.insert(gm, node, aten.unsqueeze.default, (expert, 1))
    return rewrite.insert(
        gm,
        node,
        aten.sum.dim_IntList,
        (rewrite.insert(gm, node, aten.le.Tensor, (column, numbers)), [0]),
        {"dtype": torch.int32},
    )
