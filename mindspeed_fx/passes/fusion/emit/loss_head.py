"""What a model does to logits, done to the inputs of their linear layer instead."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.loss_head import PLAIN, Head, _single, product

# --------------------------------------------------------------------------- what goes to the inputs


def inputs(gm: fx.GraphModule, node: fx.Node, head: Head) -> tuple[fx.Node, fx.Node, fx.Node | None, float]:
    """hidden [tokens, hidden], weight [vocab, hidden], bias and soft-cap, as ``head.steps`` leave them."""

    def call(target: Any, *args: Any) -> fx.Node:
        return rewrite.insert(gm, node, target, args)

    hidden, weight, bias, transposed = product(head.product)
    weight, softcap = weight if transposed else call(aten.t.default, weight), 0.0
    for step in head.steps:
        n = step.node
        if step.kind == "cap":
            softcap = step.other
        elif step.kind == "scale":
            factor = aten.div.Tensor if match.is_call(n, *match.DIV) else aten.mul.Tensor
            hidden, bias = (
                call(factor, hidden, step.other),
                bias if bias is None else call(factor, bias, _single(call, step.other)),
            )
            if softcap:
                softcap = abs(
                    softcap / match.number(step.other)
                    if factor is aten.div.Tensor
                    else softcap * match.number(step.other)
                )
        elif step.kind == "bias":
            bias = step.other if bias is None else call(aten.add.Tensor, bias, step.other)
        elif step.kind == "classes":
            weight, bias = (x if x is None else call(aten.slice.Tensor, x, 0, *step.other) for x in (weight, bias))
        elif match.is_call(n, *match.RESHAPES):
            hidden = call(aten.reshape.default, hidden, [*match.value(n).shape[:-1], match.value(hidden).shape[-1]])
        elif not match.is_call(n, *PLAIN):
            hidden = rewrite.insert(gm, node, n.target, (hidden, *n.args[1:]), dict(n.kwargs))
    dtype = match.value(head.product).dtype
    # Under autocast the linear casts its inputs itself.
    return *(
        i if i is None or match.value(i).dtype == dtype else call(aten.to.dtype, i, dtype)
        for i in (hidden, weight, bias)
    ), softcap
