"""LayerNorm: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` becomes ``mindspeed::layer_norm``.

Matched by meaning: the variance as a mean of squares, as ``var``, ``std`` or ``var_mean``, as ``mean(x^2) -
mean(x)^2``, of n or of n - 1 elements (then the weight takes the factor); any spelling of the root, the product in any
association; any eps inside the root; a weight and a bias or none; also multiplied out; or ``aten.layer_norm`` itself,
or ``aten.group_norm`` of rows in one group. A result that returns to 16 bits before its weight keeps the weight
outside, where the model rounds. Safe because the operator computes the same statistics and products in at least the
precision of the subgraph.
An eps beside the root is a near miss: no operator has it there.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, Site, calls, register, rewrite_each, site
from mindspeed_fx.passes.fusion.analysis import algebra as algebra_analysis
from mindspeed_fx.passes.fusion.analysis import moments, norms
from mindspeed_fx.passes.fusion.emit import algebra

NAME, OPERATOR = "fusion.layer_norm", "mindspeed::layer_norm"


@register(NAME)
def layer_norm(gm: fx.GraphModule, context: Context) -> PassReport:
    """LayerNorm, composed or torch.nn.LayerNorm, becomes one operator."""
    report = PassReport(NAME)
    skipped_nodes: list[fx.Node] = []
    _gather(gm)

    def fuse(node: fx.Node) -> Outcome:
        try:
            if node.target is aten.layer_norm.default:
                return _match_call(gm, node)
            if node.target is aten.group_norm.default:
                return _one_group(gm, node)
            return _match_product(gm, node, skipped_nodes)
        except Miss:
            skipped_nodes.append(node)
            raise

    nodes = calls(gm, aten.layer_norm.default, aten.group_norm.default, *match.MUL, *match.DIV)
    rewrite_each(report, OPERATOR, nodes, fuse)
    rewrite.finish(gm)
    return report


def _match_call(gm: fx.GraphModule, node: fx.Node) -> Site:
    x, shape, weight, bias, eps = (
        match.argument(node, a) for a in ("input", "normalized_shape", "weight", "bias", "eps")
    )
    if len(shape) != 1:
        raise Miss(f"normalizes over {len(shape)} dimensions; only the last one is supported")
    root, narrow = _match_narrow_cast(node, x)
    return _rewrite(gm, root, [node, root], narrow, weight, bias, float(match.number(eps)))


def _one_group(gm: fx.GraphModule, node: fx.Node) -> Site | None:
    """``group_norm`` of rows [tokens, channels] in one group."""
    x, groups, weight, bias, eps = (match.argument(node, a) for a in ("input", "num_groups", "weight", "bias", "eps"))
    if groups != 1 or match.value(x).dim() != 2:
        return None
    root, narrow = _match_narrow_cast(node, x)
    return _rewrite(gm, root, [node, root], narrow, weight, bias, float(match.number(eps)))


def _gather(gm: fx.GraphModule) -> None:
    """``x * r + (b - mean(x) * r)``, as TensorFlow writes it, becomes ``(x - mean(x)) * r + b``, the form that is
    matched, where r holds the root of a variance of x.
    """
    for node in calls(gm, *match.ADD, aten.sub.Tensor):
        for scaled, shifted, bias in _differences(node):
            result = next(
                (
                    (x, r, mean)
                    for x, r in match.operands(scaled, aten.mul.Tensor)
                    for mean, same in match.operands(shifted, aten.mul.Tensor)
                    if same is r and _is_mean(mean, x, r)
                ),
                None,
            )
            if result is None or not all(match.is_float(n) for n in result):
                continue
            x, r, mean = result
            if match.unsafe([node, scaled, shifted], [x, r, mean, bias]) is None:
                new = rewrite.insert(
                    gm, node, aten.mul.Tensor, (rewrite.insert(gm, node, aten.sub.Tensor, (x, mean)), r)
                )
                rewrite.replace(
                    gm, node, new if bias is None else rewrite.insert(gm, node, aten.add.Tensor, (new, bias))
                )
            break


def _differences(node: fx.Node) -> list[tuple[fx.Node, fx.Node, fx.Node | None]]:
    """Every (a, b, c) of which ``node`` is a - b, c being None, or a + (c - b)."""
    if match.is_call(node, aten.sub.Tensor):
        return [(*node.args, None)] if not node.kwargs else []
    parts = [(a, _difference(rest)) for a, rest in match.operands(node, *match.ADD) if isinstance(rest, fx.Node)]
    return [(a, both[1], both[0]) for a, both in parts if both is not None]


def _is_mean(n: fx.Node, x: fx.Node, r: fx.Node) -> bool:
    """Whether ``n`` is the mean of ``x`` and ``r`` a product with one over the root of its variance."""
    mean = moments.mean_of(n) if isinstance(n, fx.Node) and match.is_float(n) else None
    if mean is None or not match.same(match.uncast(mean[0]), match.uncast(x)):
        return False
    centered = [
        (result.x, result.centered) for _, result in norms.roots(algebra_analysis.product(r)) if result.dims == mean[1]
    ]
    return any(
        match.same(match.uncast(of), match.uncast(x))
        if variance
        else (both := _difference(match.uncast(of))) is not None and match.same(match.uncast(both[0]), match.uncast(x))
        for of, variance in centered
    )


def _match_product(gm: fx.GraphModule, node: fx.Node, skipped_nodes: list[fx.Node]) -> Site | None:
    """Match from the least product or quotient that holds x less its mean and the root of its variance."""
    result = norms.normal(node, _is_centered, skipped_nodes)
    if result is None:
        return
    if result.spread.differs:
        raise Miss(result.spread.differs)
    if not result.spread.last:
        raise Miss(f"normalizes over dimensions {result.spread.dims}; only the last one is supported")
    difference = match.uncast(result.x)
    x, mean = _difference(difference)
    hidden, number = match.value(x).shape[-1], 1.0 if math.isclose(result.number, 1.0, rel_tol=1e-12) else result.number
    first = next((n for n in result.over if norms.is_vector(n, hidden)), None)
    over = [n for n in result.over if n is not first]
    if (
        over
        or result.under
        or (number != 1 and first is None and not any(norms.is_vector(w, hidden) for w in _factors_of_user(node)))
    ):
        weight, bias, root = first, None, node  # what else multiplies comes before a bias
        narrow = x
    else:
        weight, bias, last = _parameters(node, hidden, first)
        root, narrow = _match_narrow_cast(last, x)
        if first is None and root is last and match.value(narrow).dtype != match.value(last).dtype:
            # Weights that the model applies after rounding, or in another type, stay outside.
            weight, bias, (root, narrow) = None, None, _match_narrow_cast(node, x)
    if match.value(narrow).itemsize < match.value(root).itemsize:
        narrow = rewrite.insert(gm, root, aten.to.dtype, (narrow, match.value(root).dtype))
    region = [root, node, difference, mean, *result.nodes]
    return _rewrite(gm, root, region, narrow, weight, bias, result.eps, number, (over, result.under))


def _factors_of_user(node: fx.Node) -> list[fx.Node]:
    return [
        w for v, w in match.operands(norms.only_user(node), aten.mul.Tensor) if v is node and isinstance(w, fx.Node)
    ]


def _is_centered(n: fx.Node, root: moments.RootMoment) -> bool:
    """Whether ``n`` is x less its mean, over the dimensions of ``root``, which is the deviation of x."""
    n, of = match.uncast(n), match.uncast(root.x)
    x, less = _difference(n) or (None, None)
    mean = moments.mean_of(less)
    if (
        mean is None
        or mean[1] != root.dims
        or len(root.dims) != 1
        or not moments.keeps(less, x, mean[1])
        or not match.same(match.uncast(mean[0]), match.uncast(x))
    ):
        return False
    return match.same(of, n) or (root.centered and match.same(of, match.uncast(x)))


def _difference(n: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, y) when ``n`` is x - y."""
    if match.is_call(n, aten.sub.Tensor) and not n.kwargs and all(match.is_float(a) for a in n.args):
        return n.args
    return next(
        (
            (x, y.args[0])
            for x, y in match.operands(n, aten.add.Tensor)
            if match.is_call(y, aten.neg.default) and match.is_float(x)
        ),
        None,
    )


def _parameters(
    node: fx.Node, hidden: int, weight: fx.Node | None = None
) -> tuple[fx.Node | None, fx.Node | None, fx.Node]:
    """(weight, bias, last node), following the only use of each value; ``weight`` where it came first."""
    first, bias = weight, None
    last, user = node, norms.only_user(node)
    for value, vector in match.operands(user, aten.mul.Tensor):
        if value is last and weight is None and norms.is_vector(vector, hidden):
            weight = vector
    if weight is not first:
        last, user = user, norms.only_user(user)
    for value, vector in match.operands(user, aten.add.Tensor):
        if value is last and bias is None and norms.is_vector(vector, hidden):
            bias = vector
    return weight, bias, last if bias is None else user


def _match_narrow_cast(last: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(root, x): the 16-bit input and the cast back to it, where there are both; else ``last`` and ``x`` in its
    type.
    """
    narrow, down = norms.strip_widening(x), norms.only_user(last)
    if narrow is not x and match.is_call(down, aten.to.dtype) and match.value(down).dtype == match.value(narrow).dtype:
        return down, narrow
    return last, x


def _rewrite(gm, root, region, x, weight, bias, eps, number=1.0, rest=((), ())) -> Site:
    if reason := match.unsafe(region, [x, weight, bias, *rest[0], *rest[1]]):
        raise Miss(reason)
    weight, bias = (p if p is None else norms.strip_widening(p) for p in (weight, bias))
    if number != 1 and weight is not None:
        wide = match.value(weight).itemsize > 2
        weight = rewrite.insert(
            gm,
            root,
            aten.mul.Tensor,
            (weight if wide else rewrite.insert(gm, root, aten.to.dtype, (weight, torch.float32)), number),
        )
        number = 1.0
    three = rewrite.insert(gm, root, torch.ops.mindspeed.layer_norm.default, (x, weight, bias, eps))
    new = algebra.multiply_factors(
        gm, root, rewrite.insert(gm, root, match.operator.getitem, (three, 0)), number, *rest
    )
    where = site(OPERATOR, root, region)
    if reason := rewrite.replace(gm, root, new):
        raise Miss(reason)
    return where
