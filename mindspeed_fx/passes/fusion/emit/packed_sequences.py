"""Where documents that are packed into one sequence end, read off the numbers that a model gives to their tokens."""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis import positions
from mindspeed_fx.passes.fusion.analysis.bands import Index


def ends(gm: fx.GraphModule, before: fx.Node, numbers: fx.Node) -> fx.Node | None:
    """[any]: the place after the last token of each document, in order, the sequence's end last; a document may be
    empty. None when ``numbers`` are not made of lengths or cumulative lengths."""
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
    if (
        not right
        or match.value(limits).dim() != 1
        or match.value(places).dim() != 1
        or positions.meaning(places) != Index(1, 0)
    ):
        return None
    # The limits may begin with 0 and may stop before the last token; documents of no tokens do no harm.
    last = rewrite.insert(
        gm,
        before,
        aten.full.default,
        ([1], seq),
        {"dtype": match.value(limits).dtype, "device": match.value(limits).device},
    )
    return rewrite.insert(gm, before, aten.cat.default, ([limits, last],))


def _shift(n: fx.Node) -> bool:
    return match.is_call(n, *match.ADD, aten.sub.Tensor, aten.sub.Scalar) and match.number(n.args[1]) is not None
