"""A residual addition and the norm that reads it become one operator."""

from __future__ import annotations

from typing import Callable

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.passes.base import Site, site


def fuse_sum(
    gm: fx.GraphModule,
    norm: fx.Node,
    parameters: list,
    operator: str,
    make: Callable,
    results: tuple[int, ...],
) -> Site | str:
    """``norm`` of a sum of two tensors, and the sum, become one operator; returns the reason where they do not.

    Args:
        norm: a call whose first argument is the sum.
        parameters: weight and bias, nodes or None.
        make: overload called with (x, residual, *the other arguments of ``norm``); its second result is the sum.
        results: which result of ``make`` stands for each result of ``norm``.
    """
    total = norm.args[0]
    x, residual = total.args
    if total.kwargs.get("alpha", 1) != 1:
        return f"the residual is scaled by {total.kwargs['alpha']}"
    values = [match.value(n) for n in (x, residual, total)]
    if any(v.dtype != values[2].dtype or v.shape != values[2].shape for v in values):
        return "the two summands differ in shape or type: " + ", ".join(
            f"{tuple(v.shape)} {v.dtype}" for v in values[:2]
        )
    reason = match.unsafe([total, norm], [x, residual, *parameters])
    if reason:
        return reason
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    # The operator stands where the sum stood, unless a weight is made later; then nobody may read the sum before it.
    if all(p is None or order[p] < order[total] for p in parameters):
        before = total
    elif all(order[u] >= order[norm] for u in total.users):
        before = norm
    else:
        return "the sum is used before the weight of the norm exists"
    new = rewrite.insert(gm, before, make, (x, residual, *norm.args[1:]))
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in norm.meta:
            new.meta[key] = norm.meta[key]
    stands_for = [rewrite.insert(gm, before, match.operator.getitem, (new, i)) for i in results]
    for user in list(norm.users):
        user.replace_all_uses_with(stands_for[user.args[1]])
    reason = rewrite.substitute(gm, total, rewrite.insert(gm, before, match.operator.getitem, (new, 1)))
    return reason or site(operator, norm, [total, norm])
