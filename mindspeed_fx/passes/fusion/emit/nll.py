"""Log-probabilities read plainly, and the steps between a loss per token and what the model made of it, again."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.base import calls
from mindspeed_fx.passes.fusion.analysis.nll import (
    OVER,
    PICKS,
    TIMES,
    LossStep,
    acts_on_rows,
    is_last_dim,
    mean_weight,
    picked_classes,
)


def read_plainly(gm: fx.GraphModule) -> None:
    """Log-probabilities as those see them who pick: views and slices of tokens come before them, signs after what is
    picked, and the greatest is that of the logits."""
    for probs in calls(gm, aten.log_softmax.int):
        if match.is_float(probs) and is_last_dim(probs, probs.args[1]):
            _pick_with_sign(gm, _view_logits(gm, probs))


def _view_logits(gm: fx.GraphModule, probs: fx.Node) -> fx.Node:
    """The log-softmax of views of the logits in the place of views of ``probs``."""
    while (
        len(probs.users) == 1
        and acts_on_rows(user := next(iter(probs.users)))
        and not match.unsafe([probs, user], [probs.args[0]])
    ):
        view = NewCall(user, user.target, probs.args[0], *user.args[1:], **user.kwargs)
        call = NewCall(user, aten.log_softmax.int, view, -1)
        order = rewrite.copy_order(user, match.value(call))
        if order is not None and order != sorted(order):
            break  # the copy would end in a view like this one, which would be moved next, and so on without an end
        moved = rewrite.build(call)
        if rewrite.substitute(gm, user, moved) is not None:
            break
        gm.graph.erase_node(user)
        probs = moved
    return probs


def _pick_with_sign(gm: fx.GraphModule, probs: fx.Node) -> None:
    """What picks of multiples of ``probs`` multiplies what is picked."""
    for user in list(probs.users):
        if match.is_call(user, aten.argmax.default) and is_last_dim(probs, match.argument(user, "dim")):
            user.replace_input_with(probs, probs.args[0])
        inner, factor = (probs, -1.0) if match.is_call(user, aten.neg.default) else match.unscale(user)
        if inner is not probs or factor == 1.0 or not user.meta["grad_enabled"] == probs.meta["grad_enabled"]:
            continue
        for pick in list(user.users):
            if picked_classes(pick, user) is not None or mean_weight(pick, user) is not None:
                new = rewrite.insert(gm, pick, pick.target, (probs, *pick.args[1:]), dict(pick.kwargs))
                if rewrite.substitute(gm, pick, rewrite.insert(gm, pick, aten.mul.Tensor, (new, factor))) is None:
                    gm.graph.erase_node(pick)
        if not user.users:
            gm.graph.erase_node(user)


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
