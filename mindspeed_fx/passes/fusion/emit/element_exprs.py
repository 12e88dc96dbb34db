"""Nodes for lists of lanes: the way back from sums of products of elements to a few slices, cats and products."""

from __future__ import annotations

from typing import Sequence

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.element_exprs import ElementExprs, Factor, Sum


def build(exprs: ElementExprs, gm: fx.GraphModule, before: fx.Node, wanted: Sequence[Sum]) -> fx.Node | None:
    """A node whose last dimension is ``wanted``: one that is there, else made of a few pieces before ``before``."""
    wanted = list(wanted)
    negated = [tuple((-w, factors) for w, factors in total) for total in wanted]
    for n, codes in reversed(exprs.read.items()):
        if codes.dim() == 1 and codes.shape[0] == len(wanted) and n is not before:
            existing = exprs.exprs(n)
            if existing == wanted:
                return n
            if existing == negated:
                return rewrite.insert(gm, before, aten.neg.default, (n,))
    if any(len(total) != 1 for total in wanted):
        return None
    pieces = _runs([total[0] for total in wanted])
    if len(pieces) <= 4:
        results = [_piece(exprs, gm, before, *piece) for piece in pieces]
        return results[0] if len(results) == 1 else rewrite.insert(gm, before, aten.cat.default, (results, -1))
    if len(wanted) % 2 == 0 and all(len(_runs([t[0] for t in wanted[i::2]])) <= 2 for i in (0, 1)):
        halves = [build(exprs, gm, before, wanted[i::2]) for i in (0, 1)]
        return rewrite.insert(
            gm,
            before,
            aten.flatten.using_ints,
            (rewrite.insert(gm, before, aten.stack.default, (halves, -1)), -2, -1),
        )
    return None


def _piece(
    exprs: ElementExprs,
    gm: fx.GraphModule,
    before: fx.Node,
    weight: float,
    factors: tuple[tuple[int, int, int], ...],
    count: int,
) -> fx.Node:
    """weight times the product of strided runs (tensor, first lane, step) of ``count`` lanes."""
    result = None
    for index, start, step in factors:
        n, dims = exprs.tensors[index]
        n = rewrite.build(n)
        if dims > 1:
            n = rewrite.insert(gm, before, aten.flatten.using_ints, (n, -dims, -1))
        n = rewrite.insert(gm, before, aten.unsqueeze.default, (n, -1)) if dims == 0 else n
        width = match.value(n).shape[-1]
        if step == 0:
            n = n if width == 1 else rewrite.insert(gm, before, aten.slice.Tensor, (n, -1, start, start + 1))
        elif (start, step, width) != (0, 1, count):
            n = rewrite.insert(gm, before, aten.slice.Tensor, (n, -1, start, start + step * (count - 1) + 1, step))
        result = n if result is None else rewrite.insert(gm, before, aten.mul.Tensor, (result, n))
    if match.value(result).shape[-1] != count:
        result = rewrite.insert(gm, before, aten.expand.default, (result, [*match.value(result).shape[:-1], count]))
    if weight == 1:
        return result
    return (
        rewrite.insert(gm, before, aten.neg.default, (result,))
        if weight == -1
        else rewrite.insert(gm, before, aten.mul.Tensor, (result, weight))
    )


def _runs(terms: list[tuple[float, tuple[Factor, ...]]]) -> list[tuple[float, tuple[tuple[int, int, int], ...], int]]:
    """``terms`` as runs (weight, ((tensor, first lane, step), ...), count) of equal weight and steady steps, as few as
    greed finds.
    """
    runs: list = []
    start = 0
    while start < len(terms):
        weight, factors = terms[start]
        stop, steps = start + 1, None
        while stop < len(terms):
            w, f = terms[stop]
            if w != weight or [t for t, _ in f] != [t for t, _ in factors]:
                break
            moved = tuple(b - a for (_, a), (_, b) in zip(terms[stop - 1][1], f))
            if any(step < 0 for step in moved) or (steps is not None and moved != steps):
                break
            steps, stop = moved, stop + 1
        runs.append(
            (
                weight,
                tuple((t, lane, step) for (t, lane), step in zip(factors, steps or [0] * len(factors))),
                stop - start,
            )
        )
        start = stop
    return runs
