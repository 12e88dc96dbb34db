"""LayerNorm: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` becomes ``mindspeed::layer_norm``.

Matched by meaning: the variance as a mean of squares, as ``var`` or ``var_mean``, as ``mean(x^2) - mean(x)^2``; any spelling of
the root and the quotient; any eps; a weight and a bias or none; or ``aten.layer_norm`` itself. A result that returns to 16 bits
before its weight keeps the weight outside, where the model rounds.
Safe because the operator computes the same statistics and products in at least the precision of the subgraph.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.fusion import match, norms
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.layer_norm", "mindspeed::layer_norm"
VAR, STD = (aten.var.dim, aten.var.correction), (aten.std.dim, aten.std.correction)
VAR_MEAN = (aten.var_mean.dim, aten.var_mean.correction)


class Miss(Exception):
    """A near miss; the text is the reason."""


@register(NAME, stage="captured", level=1, after=("plain functions",), provides=("layer_norm",))
def layer_norm(gm: fx.GraphModule, context: Context) -> PassReport:
    """LayerNorm, composed or torch.nn.LayerNorm, becomes one operator."""
    report = PassReport(NAME)
    for node in list(gm.graph.nodes):
        if node._erased or node.op != "call_function":
            continue
        try:
            if node.target is aten.layer_norm.default:
                _called(gm, report, node)
            else:
                _composed(gm, report, node)
        except Miss as miss:
            report.skipped.append(skip(OPERATOR, node, str(miss)))
    match.finish(gm)
    return report


def _called(gm: fx.GraphModule, report: PassReport, node: fx.Node) -> None:
    x, shape, weight, bias, eps = (match.argument(node, a) for a in ("input", "normalized_shape", "weight", "bias", "eps"))
    if len(shape) != 1:
        raise Miss(f"normalizes over {len(shape)} dimensions; only the last one is supported")
    root, narrow = _narrowed(node, x)
    _rewrite(gm, report, root, [node, root], narrow, weight, bias, float(match.number(eps)))


def _composed(gm: fx.GraphModule, report: PassReport, node: fx.Node) -> None:
    for centered, inside, eps, nodes in [*norms.normal(node), *_by_deviation(node)]:
        difference, first = match.uncast(centered), None
        if match.is_call(difference, aten.mul.Tensor):  # `weight * (x - mean) / root`, read from the left
            nodes = [*nodes, difference]
            found = ((match.uncast(a), b) for a, b in match.operands(difference, aten.mul.Tensor) if isinstance(b, fx.Node) and norms.is_vector(b, match.value(node).shape[-1]))
            difference, first = next((f for f in found if _centered(f[0])), (difference, None))
        if not _centered(difference):
            continue
        x, mean = difference.args
        if not _is_variance(inside, x, difference):
            continue
        weight, bias, last = _parameters(node, match.value(x).shape[-1], first)
        root, narrow = _narrowed(last, x)
        if first is None and root is last and match.value(narrow).dtype != match.value(last).dtype:
            # Weights that the model applies after rounding, or in another type, stay outside.
            weight, bias, (root, narrow) = None, None, _narrowed(node, x)
        if match.value(narrow).dtype != match.value(root).dtype:
            raise Miss(f"the input is {match.value(narrow).dtype} and the result {match.value(root).dtype}")
        _rewrite(gm, report, root, [root, node, difference, mean, *nodes], narrow, weight, bias, eps)
        return


def _centered(n: fx.Node) -> bool:
    """Whether ``n`` is x less its mean over the last dimension."""
    if not match.is_call(n, aten.sub.Tensor) or n.kwargs or not isinstance(n.args[1], fx.Node) or not match.is_column(n.args[1], n.args[0]):
        return False
    of = _mean_of(match.uncast(n.args[1]))
    return of is not None and match.same(match.uncast(of), match.uncast(n.args[0]))


def _mean_of(n: fx.Node) -> fx.Node | None:
    n = match.uncolumn(n)
    if match.is_call(n, match.operator.getitem) and n.args[1] == 1 and match.is_call(n.args[0], *VAR_MEAN):
        return n.args[0].args[0] if match.over_last(n.args[0]) else None
    return match.mean_over_last(n)


def _correction(n: fx.Node) -> float:
    names = [a.name for a in n.target._schema.arguments]
    given = match.argument(n, "unbiased" if "unbiased" in names else "correction")
    return 1 if given is None else int(given)


def _is_variance(n: fx.Node, x: fx.Node, difference: fx.Node) -> bool:
    """Whether ``n`` is the variance of ``x`` over its last dimension."""
    x, n = match.uncast(x), match.uncolumn(match.uncast(n))
    whole = n.args[0] if match.is_call(n, match.operator.getitem) and n.args[1] == 0 and match.is_call(n.args[0], *VAR_MEAN) else n
    if match.is_call(whole, *VAR, *STD, *VAR_MEAN):
        of = match.uncast(whole.args[0])
        if not match.over_last(whole) or not (match.same(of, x) or match.same(of, difference)):
            return False
        if _correction(whole):
            raise Miss("the variance is divided by n - 1 (unbiased), the operator's by n")
        return True
    if match.is_call(n, aten.sub.Tensor) and not n.kwargs:
        square, mean = match.mean_over_last(n.args[0]), match.squared(match.uncast(n.args[1]))
        of = match.squared(match.uncast(square)) if square is not None else None
        return of is not None and mean is not None and match.same(match.uncast(of), x) and match.same(match.uncast(_mean_of(match.uncast(mean))), x)
    of = match.squared(match.uncast(match.mean_over_last(n)))
    return of is not None and match.same(match.uncast(of), difference)


def _by_deviation(node: fx.Node) -> list[tuple[fx.Node, fx.Node, float, list[fx.Node]]]:
    """x / std(x), as :func:`norms.normal` has x / sqrt(var(x)); eps beside a standard deviation is a near miss."""
    if not match.is_call(node, aten.div.Tensor) or not isinstance(node.args[1], fx.Node):
        return []
    plus = match.plus_number(node.args[1])
    below = match.uncolumn(match.uncast(plus[0] if plus else node.args[1]))
    if not match.is_call(below, *STD) or not match.is_column(node.args[1], node.args[0]):
        return []
    centered = [match.uncast(node.args[0]), *(match.uncast(a) for a, _ in match.operands(match.uncast(node.args[0]), aten.mul.Tensor))]
    if plus and plus[1] and any(match.is_call(c, aten.sub.Tensor) for c in centered) and match.over_last(below):
        raise Miss("eps is added to the standard deviation, the operator adds it to the variance")
    return [(node.args[0], below, 0.0, [below])]


def _parameters(node: fx.Node, hidden: int, weight: fx.Node | None = None) -> tuple[fx.Node | None, fx.Node | None, fx.Node]:
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


def _narrowed(last: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(root, x): the 16-bit input and the cast back to it, where there are both; else ``last`` and ``x`` in its type."""
    narrow, down = norms.unwidened(x), norms.only_user(last)
    if narrow is not x and match.is_call(down, aten.to.dtype) and match.value(down).dtype == match.value(narrow).dtype:
        return down, narrow
    return last, x


def _rewrite(gm, report, root, region, x, weight, bias, eps) -> None:
    reason = match.unsafe(region, [x, weight, bias])
    if reason is None:
        weight, bias = (p if p is None else norms.unwidened(p) for p in (weight, bias))
        three = match.insert(gm, root, torch.ops.mindspeed.layer_norm.default, (x, weight, bias, eps))
        reason = match.substitute(gm, root, match.insert(gm, root, match.operator.getitem, (three, 0)))
    if reason:
        raise Miss(reason)
    report.rewrites.append(site(OPERATOR, root, region))
