"""What an attention operator is given: queries and keys in the type of the result and one mask; and its place."""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis.attention_scores import Scores
from mindspeed_fx.passes.fusion.emit import fully_masked_rows
from mindspeed_fx.passes.fusion.emit.mask import four_dimensional


def operands(
    gm: fx.GraphModule, root: fx.Node, scores: Scores, q: fx.Node, k: fx.Node, v: fx.Node, masks: list, notes: list[str]
) -> tuple[fx.Node, fx.Node, fx.Node | None, fx.Node | None]:
    """q, k, the mask, True or zero where attention is allowed, as an operator takes them, and
    :func:`fully_masked_rows.some_left`; Miss where it is not safe.
    """
    fully_masked_rows.refuse_meant(scores)
    dtype = match.value(root).dtype
    # Matching looks through casts of q and k: one that widened them to the type of v is recomputed, and one to the type
    # of their product, which may be autocast's.
    narrow = match.value(scores.product).dtype == dtype
    q, k = (cast(gm, root, x, dtype) if narrow else widen(gm, root, x, dtype) for x in (q, k))
    if not all(match.value(x).dtype == dtype for x in (q, k, v)):
        raise Miss(
            f"q, k and v are {', '.join(str(match.value(x).dtype) for x in (q, k, v))} and the result is {dtype}"
        )
    reason = match.unsafe([root, *scores.region], [q, k, v, *(m for _, m, _ in masks), scores.sinks])
    if reason:
        raise Miss(reason)
    lead = list(match.value(q).shape[:2])
    visible_rows = (
        fully_masked_rows.some_left(
            gm, root, scores, lambda m, where: four_dimensional(gm, root, m, where, lead), notes
        )
        if masks
        else None
    )
    allowed, added = None, None  # a mask is True where attention is allowed, and what is added to the scores
    for kind, m, where in masks:
        m = rewrite.insert(gm, root, aten.logical_not.default, (m,)) if kind == "drop" else m
        m = four_dimensional(gm, root, m, where, lead)
        if kind == "add":
            added = m if added is None else rewrite.insert(gm, root, aten.add.Tensor, (added, m))
        else:
            allowed = m if allowed is None else rewrite.insert(gm, root, aten.logical_and.default, (allowed, m))
    if allowed is not None and visible_rows is not None:  # no kernel sees a row without keys
        allowed = rewrite.insert(
            gm,
            root,
            aten.logical_or.default,
            (allowed, rewrite.insert(gm, root, aten.logical_not.default, (visible_rows,))),
        )
    if allowed is None or added is None:
        return q, k, added if allowed is None else allowed, visible_rows
    return q, k, rewrite.insert(gm, root, aten.where.ScalarOther, (allowed, added, -math.inf)), visible_rows


def cast(gm: fx.GraphModule, before: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if match.value(x).dtype == dtype else rewrite.insert(gm, before, aten.to.dtype, (x, dtype))


def put(gm: fx.GraphModule, root: fx.Node, scores: Scores, out: fx.Node) -> list[fx.Node]:
    if list(match.value(out).shape) != list(match.value(root).shape):
        out = rewrite.insert(gm, root, aten.reshape.default, (out, list(match.value(root).shape)))
    reason = rewrite.substitute(gm, root, out)
    if reason:
        raise Miss(reason)
    return [*scores.region, root]


def widen(gm: fx.GraphModule, before: fx.Node, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    narrow = match.value(x).dtype
    return (
        rewrite.insert(gm, before, aten.to.dtype, (x, dtype))
        if narrow != dtype and torch.promote_types(narrow, dtype) == dtype
        else x
    )
