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
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.rms_norm", "mindspeed::rms_norm"


@register(NAME, stage="captured", level=1, after=("plain functions",), provides=("rms_norm",))
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
    found = _normal(node)
    if found is None:
        return
    wide, mean, eps, inner = found
    squared = match.squared(match.mean_over_last(mean))
    if match.mean_over_last(mean) is None:
        dims = match.argument(mean, "dim")
        report.skipped.append(skip(OPERATOR, node, f"the mean square is taken over dimensions {dims} without keepdim, or not over the last one alone"))
        return
    if squared is None or not match.same(match.uncast(squared), match.uncast(wide)):
        return  # a normalization by something else
    x = _unwidened(wide)
    root, weight, cast_first = _with_weight(node, x)
    if match.value(root).dtype != _result_dtype(x, weight, cast_first):
        x, cast_first = wide, True  # the result stays wide: start from the wide input
    _rewrite(gm, report, root, [root, node, *inner], x, weight, eps, cast_first)


def _normal(node: fx.Node):
    """(x, mean, eps, nodes) when ``node`` is x / sqrt(mean + eps) in any spelling."""
    pairs = [(x, match.inverse_root(match.uncast(r)), match.uncast(r)) for x, r in match.operands(node, aten.mul.Tensor)]
    if match.is_call(node, aten.div.Tensor) and isinstance(node.args[1], fx.Node):
        pairs.append((node.args[0], match.root(match.uncast(node.args[1])), node.args[1]))
    for x, inside, r in pairs:
        if isinstance(inside, fx.Node) and match.is_float(x):
            plus = match.plus_number(inside)
            mean, eps = plus if plus else (inside, 0.0)
            if match.is_call(match.uncast(mean), aten.mean.dim, *match.DIV):
                return x, match.uncast(mean), float(eps), [r, inside, mean]
    return None


def _unwidened(x: fx.Node) -> fx.Node:
    """The 16-bit tensor that ``x`` is the widened form of, else ``x``."""
    source = match.uncast(x)
    return source if match.value(source).itemsize < match.value(x).itemsize and match.value(source).itemsize == 2 else x


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _with_weight(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node | None, bool]:
    """(last node, weight, whether the down-cast comes before the weight), following the only use of each value."""
    dtype, hidden = match.value(x).dtype, match.value(x).shape[-1]
    last, user = node, _only_user(node)
    if match.is_call(user, aten.to.dtype) and match.value(user).dtype == dtype:
        last, user = user, _only_user(user)
    for value, weight in match.operands(user, aten.mul.Tensor):
        vector = match.is_float(weight) and match.value(weight).dim() == 1 and match.value(weight).shape[0] == hidden
        if value is last and vector:
            if match.value(last).dtype == dtype:
                return user, weight, True
            down = _only_user(user)
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
