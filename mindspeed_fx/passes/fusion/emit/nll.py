"""The steps between a loss per token and what the model made of it, again."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.nll import OVER, PICKS, TIMES, LossStep


def repeat_steps(gm: fx.GraphModule, before: fx.Node, loss: fx.Node, steps: list[LossStep]) -> fx.Node:
    """``steps`` applied to another ``loss`` of each token."""
    for step in steps:
        shape = list(match.value(step.source).shape)
        loss = (
            loss
            if list(match.value(loss).shape) == shape
            else rewrite.insert(gm, before, aten.reshape.default, (loss, shape))
        )
        n = step.node
        args = (loss, step.other) if match.is_call(n, *TIMES, *OVER) else (loss, *n.args[1:])
        loss = rewrite.insert(gm, before, n.target, args, dict(n.kwargs))
    return loss


def emit_loss(gm: fx.GraphModule, leaf: fx.Node, logits: fx.Node, lse: fx.Node) -> fx.Node:
    """The picked value, mean or sum of log-probabilities ``leaf``, from logits and their log-sum-exp [...], where
    others read it besides the loss.
    """

    def call(target: Any, *args: Any) -> fx.Node:
        return rewrite.insert(gm, leaf, target, args)

    wide = match.value(lse).dtype
    if match.is_call(leaf, *PICKS):
        own = rewrite.insert(gm, leaf, leaf.target, (logits, *leaf.args[1:]), dict(leaf.kwargs))
    else:
        own = rewrite.insert(gm, leaf, leaf.target, (logits, *leaf.args[1:]), {**leaf.kwargs, "dtype": wide})
    own = own if match.value(own).dtype == wide else call(aten.to.dtype, own, wide)
    lse = (
        lse
        if match.value(lse).shape == match.value(own).shape
        else call(aten.reshape.default, lse, list(match.value(own).shape))
    )
    return call(
        aten.sub.Tensor,
        own,
        call(aten.mul.Tensor, lse, match.value(logits).shape[-1]) if match.is_call(leaf, aten.sum.dim_IntList) else lse,
    )
