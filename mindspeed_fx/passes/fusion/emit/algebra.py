"""A product of factors put behind a call."""

from __future__ import annotations

from typing import Sequence

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.algebra import EXPANDED


def multiply_factors(
    gm: fx.GraphModule, before: fx.Node, new: fx.Node, number: float, over: Sequence[fx.Node], under: Sequence[fx.Node]
) -> fx.Node:
    """``new`` times the factors that an operator left over, expanded where the model expands them."""
    over = [_spread(gm, before, factor, match.value(new).shape) for factor in over]
    for factor in (*over, *([number] if number != 1 else [])):
        new = rewrite.insert(gm, before, aten.mul.Tensor, (new, factor))
    for divisor in under:
        new = rewrite.insert(gm, before, aten.div.Tensor, (new, divisor))
    return new


def _spread(gm: fx.GraphModule, before: fx.Node, n: fx.Node, whole: torch.Size) -> fx.Node:
    """``n`` as the model expands it on the way to ``whole``."""
    wanted = [match.value(u).shape for u in n.users if match.is_call(u, *EXPANDED)]
    shape = next(
        (
            s
            for s in wanted
            if len(s) == len(whole) == match.value(n).dim() and all(a == b or a == 1 for a, b in zip(s, whole))
        ),
        match.value(n).shape,
    )
    return n if shape == match.value(n).shape else rewrite.insert(gm, before, aten.expand.default, (n, list(shape)))
