"""An activation function in any spelling becomes one call."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Outcome, PassReport, calls, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import norms
from mindspeed_fx.passes.fusion.analysis.activations import SelfGated, readings, sums
from mindspeed_fx.passes.fusion.emit import algebra

# --------------------------------------------------------------------------- rewriting


def fuse(
    gm: fx.GraphModule, name: str, operator: str, make: Callable[[SelfGated], tuple[Any, tuple, dict] | None]
) -> PassReport:
    """Rewrite every activation of which ``make`` says the (overload, arguments after x, keywords); None for those of
    another pass.
    """
    report = PassReport(name)
    skipped_nodes: list[fx.Node] = []

    def rewrite_one(node: fx.Node) -> Outcome:
        result, call = (
            next(
                (
                    (f, call)
                    for f in (sums if match.is_call(node, *match.ADD) else readings)(node, skipped_nodes)
                    if (call := make(f)) is not None
                ),
                (None, None),
            )
            if match.is_float(node)
            else (None, None)
        )
        if call is None:
            return None
        root, number, numbers = norms.scaled_on(node, result.number)
        region = [root, *numbers, *result.nodes]
        where = site(operator, root, region)
        reason = result.near or match.unsafe(region, [result.x, *result.over, *result.under])
        reason = reason or _rewrite(gm, root, result, number, call)
        if reason:
            skipped_nodes.append(node)
        return reason or where

    rewrite_each(report, operator, calls(gm, *match.MUL, *match.DIV, *match.ADD), rewrite_one)
    rewrite.finish(gm)
    return report


def _rewrite(
    gm: fx.GraphModule, root: fx.Node, result: SelfGated, number: float, call: tuple[Any, tuple, dict]
) -> str | None:
    overload, further, keywords = call
    x, dtype = result.x, match.value(root).dtype
    if torch.promote_types(match.value(x).dtype, dtype) != match.value(x).dtype:
        x = rewrite.insert(gm, root, aten.to.dtype, (x, dtype))  # the model multiplies in this type
    new = rewrite.insert(gm, root, overload, (x, *further), keywords)
    return rewrite.replace(gm, root, algebra.multiply_factors(gm, root, new, number, result.over, result.under))
