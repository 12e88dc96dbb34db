"""RMSNorm: ``x * rsqrt(mean(x^2) + eps) * weight`` becomes ``mindspeed::rms_norm``.

Matched by meaning: the root of a mean or a sum of squares, or a norm, and numbers that make a mean of it
(``F.normalize(x) * sqrt(d) * w``); the product in any association; any eps inside the root; a weight or none, before or
after the down-cast, with an offset (``1 + w`` is just another weight); or ``aten.rms_norm`` itself. Safe because the
operator computes the same mean and product in at least the precision of the subgraph. An eps beside the root is a near
miss: no operator has it there.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.kernels.base import accumulation_dtype
from mindspeed_fx.passes.base import Context, Outcome, PassReport, Site, Skip, calls, register, rewrite_each, site, skip
from mindspeed_fx.passes.fusion.analysis import algebra as algebra_analysis
from mindspeed_fx.passes.fusion.analysis import moments, norms
from mindspeed_fx.passes.fusion.emit import algebra

NAME, OPERATOR = "fusion.rms_norm", "mindspeed::rms_norm"


@register(NAME)
def rms_norm(gm: fx.GraphModule, context: Context) -> PassReport:
    """RMSNorm, composed or torch.nn.RMSNorm, becomes one operator."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, aten.rms_norm.default), functools.partial(_match_call, gm))
    skipped_nodes: list[fx.Node] = []
    products = (n for n in calls(gm, *match.MUL, *match.DIV) if match.is_float(n))
    rewrite_each(report, OPERATOR, products, lambda node: _match_product(gm, node, skipped_nodes))
    rewrite.finish(gm)
    return report


def _match_call(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    x, shape, weight, eps = (match.argument(node, a) for a in ("input", "normalized_shape", "weight", "eps"))
    if len(shape) != 1:
        return f"normalizes over {len(shape)} dimensions; only the last one is supported"
    # Without an eps torch takes that of the type it computes in.
    eps = torch.finfo(accumulation_dtype(match.value(x).dtype)).eps if eps is None else eps
    return _rewrite(gm, node, [node], x, weight, float(eps), cast_first=False)


def _match_product(gm: fx.GraphModule, node: fx.Node, skipped_nodes: list[fx.Node]) -> Outcome:
    """Match from the least product or quotient that holds x and its root."""
    result = norms.normal(node, _is_x, skipped_nodes)
    if result is None:
        return None
    hidden, x = match.value(result.x).shape[-1], norms.strip_widening(result.x)
    weight = next((n for n in result.over if norms.is_vector(n, hidden)), None)
    over = [n for n in result.over if n is not weight]
    other = bool(result.over or result.under)
    end, number, passed = norms.scaled_on(node, result.number, None if other else hidden)
    if other:
        root, cast_first, down = end, False, norms.only_user(end)
        if (
            not over
            and not result.under
            and match.is_call(down, aten.to.dtype)
            and match.value(down).dtype == match.value(x).dtype
        ):
            root = down
        weight = match.uncast(weight)
    else:
        root, weight, cast_first, reached = _with_weight(node, x, end)
        if not reached:
            number, passed = result.number, []
            root, weight, cast_first, _ = _with_weight(node, x, node)
    number = 1.0 if math.isclose(number, 1.0, rel_tol=1e-7) else number
    if number != 1 and weight is None:
        return None  # divided by its norm, and no weight takes the factor: not what is called RMSNorm
    region = [root, node, *passed, *result.nodes]
    reason = result.spread.differs
    if not result.spread.last:
        reason = f"the mean square is taken over dimensions {result.spread.dims}, not over the last one alone"
    reason = reason or match.unsafe(region, [x, weight, *over, *result.under])
    if reason:
        skipped_nodes.append(node)
        return reason
    if match.value(root).dtype != _result_dtype(x, weight, cast_first) or over or result.under:
        x, cast_first = result.x, not other  # the result stays wide: start from the wide input
        if match.value(x).itemsize < match.value(root).itemsize:
            x = rewrite.insert(gm, root, aten.to.dtype, (x, match.value(root).dtype))
    if number != 1:
        if match.value(weight).itemsize == 2:
            weight, cast_first = rewrite.insert(gm, root, aten.to.dtype, (weight, torch.float32)), False
        weight = rewrite.insert(gm, root, aten.mul.Tensor, (weight, number))
    return _rewrite(gm, root, region, x, weight, result.eps, cast_first, (over, result.under))


def _is_x(n: fx.Node, root: moments.RootMoment) -> bool:
    return not root.centered and match.same(match.uncast(n), match.uncast(root.x))


def _with_weight(node: fx.Node, x: fx.Node, end: fx.Node) -> tuple[fx.Node, fx.Node | None, bool, bool]:
    """(last node, weight, whether the down-cast comes before the weight, whether ``end`` was reached), following the
    only use of each value; on the way to ``end`` numbers are passed."""
    dtype, hidden = match.value(x).dtype, match.value(x).shape[-1]
    last, weight, cast_first, wide, reached = node, None, True, False, end is node
    while (user := norms.only_user(last)) is not None:
        vector = next(
            (
                w
                for v, w in match.operands(user, aten.mul.Tensor)
                if v is last and isinstance(w, fx.Node) and norms.is_vector(w, hidden)
            ),
            None,
        )
        if (
            match.is_call(user, aten.to.dtype)
            and match.value(user).dtype == dtype != match.value(last).dtype
            and (weight is None or wide)
        ):
            cast_first = weight is None
        elif vector is not None and weight is None:
            weight, wide = vector, match.value(last).dtype != dtype
        elif reached or (factor := algebra_analysis.linear_step(user)) is None or factor[0] is not last:
            break
        last, reached = user, reached or user is end
    return last, weight if cast_first or weight is None else match.uncast(weight), cast_first, reached


def _result_dtype(x: fx.Node, weight: fx.Node | None, cast_first: bool) -> torch.dtype:
    dtype = match.value(x).dtype
    return torch.promote_types(dtype, match.value(weight).dtype) if weight is not None and cast_first else dtype


def _rewrite(gm, root, region, x, weight, eps, cast_first, rest=((), ())) -> Site | Skip:
    where = site(OPERATOR, root, region)
    reason = match.unsafe(region, [x, weight])
    if reason is None:
        both = rewrite.insert(gm, root, torch.ops.mindspeed.rms_norm.default, (x, weight, eps, cast_first))
        new = rewrite.insert(gm, root, match.operator.getitem, (both, 0))
        reason = rewrite.replace(gm, root, algebra.multiply_factors(gm, root, new, 1.0, *rest))
    return skip(OPERATOR, root, reason) if reason else where
