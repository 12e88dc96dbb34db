"""Where documents that are packed into one sequence end, read off the numbers that a model gives to their tokens."""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis import positions
from mindspeed_fx.passes.fusion.analysis.bands import Index


def ends(gm: fx.GraphModule, before: fx.Node, numbers: fx.Node, batch: int) -> fx.Node | None:
    """[any]: the place after the last token of each document, in order, each row's end after those of its documents,
    counted over all rows of the ``batch``; a document may be empty. None when ``numbers`` are not made of lengths or
    cumulative lengths."""
    result = _ends_of_rows(gm, before, numbers)
    if result is None or batch == 1:
        return result
    held = match.value(result)
    begins = rewrite.insert(
        gm,
        before,
        aten.arange.start_step,
        (0, batch * match.value(numbers).shape[-1], match.value(numbers).shape[-1]),
        {"dtype": held.dtype, "device": held.device},
    )
    begins = rewrite.insert(gm, before, aten.unsqueeze.default, (begins, 1))
    both = rewrite.insert(gm, before, aten.add.Tensor, (result, begins))
    return rewrite.insert(gm, before, aten.flatten.using_ints, (both,))


def _ends_of_rows(gm: fx.GraphModule, before: fx.Node, numbers: fx.Node) -> fx.Node | None:
    """[any], or [rows, any] where rows have documents of their own: ends within a row."""
    while match.is_call(numbers, aten.unsqueeze.default, aten.to.dtype, aten.expand.default, *match.RESHAPES) or _shift(
        numbers
    ):
        if match.value(numbers.args[0]).numel() != match.value(numbers).numel():
            return None
        numbers = numbers.args[0]
    seq = match.value(numbers).shape[-1]
    if match.is_call(numbers, aten.searchsorted.Tensor):
        limits, places, right = (
            numbers.args[0],
            numbers.args[1],
            match.argument(numbers, "right", False) or match.argument(numbers, "side") == "right",
        )
    elif match.is_call(numbers, aten.bucketize.Tensor):
        limits, places, right = numbers.args[1], numbers.args[0], match.argument(numbers, "right", False)
    elif match.is_call(numbers, aten.repeat_interleave.self_Tensor, aten.repeat_interleave.Tensor):
        lengths = match.argument(numbers, "repeats")
        plain = match.value(lengths).dim() == 1 and (
            numbers.target is aten.repeat_interleave.Tensor or positions.meaning(numbers.args[0]) == Index(1, 0)
        )
        return rewrite.insert(gm, before, aten.cumsum.default, (lengths, 0)) if plain else None
    else:
        return None
    rows = match.value(limits).shape[:-1]
    if not right or len(rows) > 1 or match.value(places).shape[:-1] != rows or positions.meaning(places) != Index(1, 0):
        return None
    # The limits may begin with 0 and may stop before the last token; documents of no tokens do no harm.
    last = rewrite.insert(
        gm,
        before,
        aten.full.default,
        ([*rows, 1], seq),
        {"dtype": match.value(limits).dtype, "device": match.value(limits).device},
    )
    return rewrite.insert(gm, before, aten.cat.default, ([limits, last], -1))


def _shift(n: fx.Node) -> bool:
    return match.is_call(n, *match.ADD, aten.sub.Tensor, aten.sub.Scalar) and match.number(n.args[1]) is not None
