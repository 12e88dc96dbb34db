"""Softmax of scaled and masked scores that ``fusion.attention`` left: ``mindspeed::scaled_masked_softmax``.

For attention whose weights must exist, because the model returns or drops them in a way that no attention kernel has.
On npu alone: elsewhere generated code makes one kernel of it as it is. Matched from the softmax inward over casts, one
boolean mask with a value of -10000 or less, and scales; a cast back to the type of the scores belongs to it. Safe
because exp(-10000) is zero next to an ordinary score, which one that was masked before is not; rows that are masked
whole differ only where the model used minus infinity, which makes them NaN.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.scaled_masked_softmax import scaled_masked_softmax as operator
from mindspeed_fx.passes.base import Context, Outcome, PassReport, Site, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import mask as mask_analysis

NAME, OPERATOR = "fusion.scaled_masked_softmax", "mindspeed::scaled_masked_softmax"


class Scores(NamedTuple):
    """What stands before the softmax: ``mask(scale * x)``."""

    x: fx.Node
    mask: fx.Node
    masked: bool
    """True where ``mask`` is True: masked; else where it is False."""
    scale: float
    region: list[fx.Node]


@register(NAME)
def scaled_masked_softmax(gm: fx.GraphModule, context: Context) -> PassReport:
    """The softmax of attention weights that are needed, its scale and its mask become one kernel."""
    report = PassReport(NAME)
    softmaxes = calls(gm, aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
    rewrite_each(report, OPERATOR, softmaxes, functools.partial(_fuse, gm, context))
    rewrite.finish(gm)
    return report


def _fuse(gm: fx.GraphModule, context: Context, node: fx.Node) -> Outcome:
    result = _scores(node)
    if result is None:
        return None
    if context.options.target != "npu" and NAME not in context.options.enable:
        return (
            f"one kernel already where code is generated, and no kernel on {context.options.target}; put "
            f'"{NAME}" in enable to fuse all the same'
        )
    return _rewrite(gm, node, result, context.options.target)


def _scores(node: fx.Node) -> Scores | None:
    """The masked scores behind a softmax over the last of four dimensions."""
    value = match.value(node)
    if value.dim() != 4 or node.args[1] % 4 != 3 or not match.is_float(node.args[0]):
        return None
    n, region = node.args[0], [node]
    while match.is_call(n, aten.to.dtype) and match.is_float(n.args[0]):
        region.append(n)
        n = n.args[0]
    if match.is_call(n, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and mask_analysis.blocks(n.args[2]):
        inner, arg, masked = n.args[0], n.args[1], True
    elif (
        match.is_call(n, aten.where.self, aten.where.ScalarOther)
        and mask_analysis.blocks(n.args[2])
        and isinstance(n.args[1], fx.Node)
    ):
        inner, arg, masked = n.args[1], n.args[0], False
    else:
        return None
    region.append(n)
    x, scale = match.unscale(match.uncast(inner))
    x = match.uncast(x)
    walk = inner
    while walk is not x:
        region.append(walk)
        walk = next(a for a in walk.args if isinstance(a, fx.Node) and match.number(a) is None)
    return Scores(x, arg, masked, float(scale), region)


def _rewrite(gm: fx.GraphModule, node: fx.Node, result: Scores, target: str) -> Site | str:
    x, narrow = result.x, match.value(result.x).dtype
    user = next(iter(node.users)) if len(node.users) == 1 else None
    root = user if match.is_call(user, aten.to.dtype) and match.value(user).dtype == narrow else node
    if match.value(x).shape != match.value(node).shape:
        return "the mask widens the scores"
    if _hides(x):
        return "the scores are masked before, too: by a lower number, they would weigh nothing beside the mask's -10000"
    if match.value(result.mask).dtype != torch.bool:
        return f"the mask is {match.value(result.mask).dtype}, not boolean".replace("torch.", "")
    region = [*result.region, *([root] if root is not node else [])]
    if reason := match.unsafe(region, [x, result.mask]):
        return reason
    arg = result.mask
    if match.value(root).dtype != narrow:
        x = rewrite.insert(gm, root, aten.to.dtype, (x, match.value(root).dtype))
    while match.value(arg).dim() < 4:
        arg = rewrite.insert(gm, root, aten.unsqueeze.default, (arg, 0))
    arg = arg if result.masked else rewrite.insert(gm, root, aten.logical_not.default, (arg,))
    if target == "npu":
        kernel, reasons = operator.choose("npu", (match.value(x), match.value(arg), result.scale), {})
        if kernel is None:
            return "; ".join(reasons)
    reason = rewrite.substitute(gm, root, rewrite.insert(gm, root, operator.overload, (x, arg, result.scale)))
    return reason or site(OPERATOR, root, region)


def _hides(n: Any, depth: int = 12) -> bool:
    """Whether scores are set to, or get added, a number that hides them."""
    if not depth or not isinstance(n, fx.Node):
        return False
    if match.is_call(n, *_SETTING):
        args = n.args[1:] if n.target in _CHOOSING else n.args
        return any(mask_analysis.blocks(a) or _hides(a, depth - 1) for a in args)
    if match.is_call(n, *match.ADD):
        return any(mask_analysis.added(a) is not None or _hides(a, depth - 1) for a in n.args)
    inner = match.unscale(match.uncast(n))[0]
    return inner is not n and _hides(inner, depth - 1)


_CHOOSING = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
_SETTING = (aten.masked_fill.Scalar, aten.masked_fill.Tensor, *_CHOOSING)
