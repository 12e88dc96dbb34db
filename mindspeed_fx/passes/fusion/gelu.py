"""GELU written out in elementary functions becomes ``aten.gelu``.

The tanh form ``0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`` of GPT-2 and the erf form
``0.5 x (1 + erf(x / sqrt(2)))``, factors in any order. Every target has a kernel for the operator, forward and backward,
and its backward keeps x alone. Safe because it is the same formula.
"""

from __future__ import annotations

import math
from typing import Any

import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, calls, register, site, skip
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

NAME, OPERATOR = "fusion.gelu", "aten::gelu"


@register(NAME, stage="captured", level=1, after=("plain functions",), provides=("gelu",))
def gelu(gm: fx.GraphModule, context: Context) -> PassReport:
    """GELU in elementary functions becomes aten.gelu."""
    report = PassReport(NAME)
    for node in calls(gm, aten.mul.Tensor, aten.mul.Scalar, *match.DIV):
        found = _gelu(node)
        if found is None:
            continue
        x, approximate, region = found
        reason = match.unsafe(region, [x])
        if reason is None:
            reason = match.substitute(gm, node, match.insert(gm, node, aten.gelu.default, (x,), {"approximate": approximate}))
        if reason:
            report.skipped.append(skip(OPERATOR, node, reason))
        else:
            report.rewrites.append(site(OPERATOR, node, region))
    match.finish(gm)
    return report


def _gelu(node: fx.Node) -> tuple[fx.Node, str, list[fx.Node]] | None:
    """(x, "none" or "tanh", nodes) when ``node`` is 0.5 * x * (1 + erf or tanh of x)."""
    product, factor = match.unscale(node)
    for one_plus, rest in match.operands(product, aten.mul.Tensor):
        plus = match.plus_number(one_plus)
        if plus is None or plus[1] != 1 or not match.is_call(plus[0], aten.tanh.default, aten.erf.default) or not isinstance(rest, fx.Node):
            continue
        form = "tanh" if plus[0].target is aten.tanh.default else "none"
        for x, inner in match.unscalings(rest):  # x may be scaled itself
            if math.isclose(factor * inner, 0.5, rel_tol=1e-6) and match.value(x).dtype == match.value(node).dtype and _close(_polynomial(plus[0].args[0], x), _ARGUMENT[form]):
                return x, form, [node, product, one_plus, plus[0]]
    return None


_ARGUMENT = {"tanh": {1: math.sqrt(2 / math.pi), 3: math.sqrt(2 / math.pi) * 0.044715}, "none": {1: math.sqrt(0.5)}}
"""What is inside tanh or erf, as coefficients of the powers of x."""


def _close(a: dict[int, float] | None, b: dict[int, float]) -> bool:
    return a is not None and a.keys() == b.keys() and all(math.isclose(a[p], b[p], rel_tol=1e-5) for p in b)


def _polynomial(n: Any, x: fx.Node, depth: int = 8) -> dict[int, float] | None:
    """Coefficients by power when ``n`` is a polynomial of x in any spelling, else None."""
    if match.same(n, x):
        return {1: 1.0}
    if match.number(n) is not None:
        return {0: float(match.number(n))}
    if depth == 0 or not isinstance(n, fx.Node):
        return None
    if match.is_call(n, aten.pow.Tensor_Scalar) and n.args[1] in (2, 3):
        inner = _polynomial(n.args[0], x, depth - 1)
        square = _times(inner, inner)
        return square if n.args[1] == 2 else _times(square, inner)
    if match.is_call(n, *match.DIV) and match.number(n.args[1]) and not n.kwargs:
        return _times(_polynomial(n.args[0], x, depth - 1), {0: 1 / match.number(n.args[1])})
    for targets, combine in ((match.MUL, _times), (match.ADD, _plus)):
        for a, b in match.operands(n, *targets)[:1]:
            return combine(_polynomial(a, x, depth - 1), _polynomial(b, x, depth - 1))
    return None


def _times(a: dict[int, float] | None, b: dict[int, float] | None) -> dict[int, float] | None:
    if a is None or b is None:
        return None
    product: dict[int, float] = {}
    for p, c in a.items():
        for q, d in b.items():
            product[p + q] = product.get(p + q, 0.0) + c * d
    return product


def _plus(a: dict[int, float] | None, b: dict[int, float] | None) -> dict[int, float] | None:
    return None if a is None or b is None else {p: a.get(p, 0.0) + b.get(p, 0.0) for p in a.keys() | b.keys()}
