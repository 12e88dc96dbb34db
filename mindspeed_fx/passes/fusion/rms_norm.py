"""RMSNorm: ``x * rsqrt(mean(x^2) + eps) * weight`` becomes ``mindspeed::rms_norm``.

Matched by meaning: any spelling of the square, the inverse root and the product; any eps; a weight or none, before or
after the down-cast, with an offset (``1 + w`` is just another weight); or ``aten.rms_norm`` itself.
Safe because the operator computes the same mean and product in at least the precision of the subgraph.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match, norms
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.rms_norm", "mindspeed::rms_norm"


@register(NAME, stage="captured", level=1, after=("plain functions", "layer_norm"), provides=("rms_norm",))
def rms_norm(gm: fx.GraphModule, context: Context) -> PassReport:
    """RMSNorm, composed or torch.nn.RMSNorm, becomes one operator."""
    report = PassReport(NAME)
    for node in calls(gm, aten.rms_norm.default):
        x, shape, weight, eps = (match.argument(node, a) for a in ("input", "normalized_shape", "weight", "eps"))
        if len(shape) != 1:
            report.skipped.append(skip(OPERATOR, node, f"normalizes over {len(shape)} dimensions; only the last one is supported"))
            continue
        # Without an eps torch takes that of the type it computes in.
        eps = torch.finfo(accumulation_dtype(match.value(x).dtype)).eps if eps is None else eps
        _rewrite(gm, report, node, [node], x, weight, float(eps), cast_first=False)
    for node in list(gm.graph.nodes):
        if not node._erased:
            _composed(gm, report, node)
    match.finish(gm)
    return report


def _composed(gm: fx.GraphModule, report: PassReport, node: fx.Node) -> None:
    """Match from the product ``x * inverse_root`` or the quotient ``x / root``."""
    found = next((f for f in norms.normal(node) if match.is_call(match.uncolumn(f[1]), aten.mean.dim, *match.DIV)), None)
    if found is None:
        return
    wide, mean, eps, inner = found
    mean = match.uncolumn(mean)
    squared = match.squared(match.mean_over_last(mean))
    if match.mean_over_last(mean) is None:
        report.skipped.append(skip(OPERATOR, node, f"the mean square is taken over dimensions {match.argument(mean, 'dim')}, not over the last one alone"))
        return
    if squared is None:
        return
    if not match.same(match.uncast(squared), match.uncast(wide)):
        first = norms.weighted(wide, match.uncast(squared))
        if first is not None:  # else a normalization by something else
            _weight_first(gm, report, node, *first, eps, [wide, *inner])
        return
    x = norms.unwidened(wide)
    root, weight, cast_first = _with_weight(node, x)
    if match.value(root).dtype != _result_dtype(x, weight, cast_first):
        x, cast_first = wide, True  # the result stays wide: start from the wide input
    _rewrite(gm, report, root, [root, node, *inner], x, weight, eps, cast_first)


def _weight_first(gm: fx.GraphModule, report: PassReport, node: fx.Node, wide: fx.Node, weight: fx.Node, eps: float, inner: list[fx.Node]) -> None:
    """``weight * x / root``, read from the left."""
    x, down = norms.unwidened(wide), norms.only_user(node)
    root = down if match.is_call(down, aten.to.dtype) and match.value(down).dtype == match.value(x).dtype else node
    x = x if match.value(root).dtype == match.value(x).dtype else wide
    if match.value(root).dtype != match.value(x).dtype:
        report.skipped.append(skip(OPERATOR, node, f"the input is {match.value(x).dtype} and the result {match.value(root).dtype}"))
    else:
        _rewrite(gm, report, root, [root, node, *inner], x, match.uncast(weight), eps, False)


def _with_weight(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node | None, bool]:
    """(last node, weight, whether the down-cast comes before the weight), following the only use of each value."""
    dtype, hidden = match.value(x).dtype, match.value(x).shape[-1]
    last, user = node, norms.only_user(node)
    if match.is_call(user, aten.to.dtype) and match.value(user).dtype == dtype:
        last, user = user, norms.only_user(user)
    for value, weight in match.operands(user, aten.mul.Tensor):
        if value is last and norms.is_vector(weight, hidden):
            if match.value(last).dtype == dtype:
                return user, weight, True
            down = norms.only_user(user)
            if match.is_call(down, aten.to.dtype) and match.value(down).dtype == dtype:
                return down, match.uncast(weight), False
            return user, weight, True
    return last, None, True


def _result_dtype(x: fx.Node, weight: fx.Node | None, cast_first: bool) -> torch.dtype:
    dtype = match.value(x).dtype
    return torch.promote_types(dtype, match.value(weight).dtype) if weight is not None and cast_first else dtype


def _rewrite(gm, report, root, region, x, weight, eps, cast_first) -> None:
    reason = match.unsafe(region, [x, weight])
    if reason is None:
        both = match.insert(gm, root, torch.ops.mindspeed.rms_norm.default, (x, weight, eps, cast_first))
        new = match.insert(gm, root, match.operator.getitem, (both, 0))
        reason = match.substitute(gm, root, new)
    if reason is None:
        report.rewrites.append(site(OPERATOR, root, region))
    else:
        report.skipped.append(skip(OPERATOR, root, reason))
