"""One-hot and smoothed targets become picked values and shares of the sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.edit import drop_dead
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import calls
from mindspeed_fx.passes.fusion.analysis.targets import (
    MEAN,
    NONE,
    SUM,
    SUMS,
    Distribution,
    _match_weighted_sum,
    distribution,
)

# --------------------------------------------------------------------------- the rewrite


def pick_instead(gm: fx.GraphModule) -> None:
    """Rewrite every sum of values times one-hot targets, and every ``cross_entropy`` with such probabilities."""
    for node in calls(gm, aten.cross_entropy_loss.default):
        _without_probabilities(gm, node)
    for node in calls(gm, *SUMS, aten.einsum.default):
        result = _match_weighted_sum(node) if match.is_float(node) else None
        if result is None:
            continue
        y, targets, region = result
        if targets.target is None or match.unsafe([node, *region], [y, targets.target]):
            continue
        rows = _rows(gm, node, y, targets)
        if node.target is aten.einsum.default:
            rows = rows if match.value(node).dim() else rewrite.insert(gm, node, aten.sum.default, (rows,))
        elif node.target is aten.sum.dim_IntList:
            rank = match.rank(y)
            dims = [d % rank for d in node.args[1] or range(rank) if d % rank != rank - 1]
            kept = match.argument(node, "keepdim", False)
            rows = rewrite.insert(gm, node, aten.unsqueeze.default, (rows, -1)) if kept else rows
            rows = rewrite.insert(gm, node, aten.sum.dim_IntList, (rows, dims, kept)) if dims else rows
        else:
            rows = rewrite.insert(gm, node, node.target, (rows,))
            rows = (
                rewrite.insert(gm, node, aten.div.Tensor, (rows, match.value(y).shape[-1]))
                if node.target is aten.mean.default
                else rows
            )
        rewrite.substitute(gm, node, rows)
    drop_dead(gm)


def _rows(gm: fx.GraphModule, node: fx.Node, y: fx.Node, targets: Distribution) -> fx.Node:
    """weight * y[target] + share * sum(y), a number for each row."""

    def call(target: Any, *args: Any) -> fx.Node:
        return rewrite.insert(gm, node, target, args)

    index, classes = targets.target, match.value(y).shape[-1]
    index = index if match.value(index).dtype == torch.int64 else call(aten.to.dtype, index, torch.int64)
    index = index if match.value(index).dim() == match.value(y).dim() else call(aten.unsqueeze.default, index, -1)
    rows = call(aten.squeeze.dim, call(aten.gather.default, y, -1, index), -1)
    rows = rows if targets.weight == 1 else call(aten.mul.Tensor, rows, targets.weight)
    if abs(targets.share) * (classes if isinstance(classes, int) else 1) < 1e-12:
        return rows
    return call(aten.add.Tensor, rows, call(aten.mul.Tensor, call(aten.sum.dim_IntList, y, [-1]), targets.share))


def _without_probabilities(gm: fx.GraphModule, node: fx.Node) -> None:
    """``cross_entropy(x, p)`` [tokens, classes] as the negative sum of p times the log-probabilities."""
    x, p = node.args[0], match.argument(node, "target")
    if (
        not match.is_float(p)
        or match.value(x).dim() != 2
        or match.argument(node, "weight") is not None
        or (result := distribution(p)) is None
        or result.target is None
    ):
        return
    smoothing, reduction = (
        float(match.argument(node, "label_smoothing", 0.0) or 0.0),
        match.argument(node, "reduction", MEAN),
    )
    classes = match.value(x).shape[-1]
    if match.unsafe([node], [x, result.target]) or not isinstance(classes, int):
        return
    result = result.times(1 - smoothing)
    result = result._replace(share=result.share + smoothing / classes)
    rows = rewrite.insert(
        gm, node, aten.neg.default, (_rows(gm, node, rewrite.insert(gm, node, aten.log_softmax.int, (x, -1)), result),)
    )
    rewrite.substitute(
        gm,
        node,
        rows
        if reduction == NONE
        else rewrite.insert(gm, node, aten.sum.default if reduction == SUM else aten.mean.default, (rows,)),
    )
