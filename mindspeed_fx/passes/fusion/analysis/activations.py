"""Activations that are x times a probability of x: SiLU and swish with the logistic function, GELU with the normal
distribution.

The logistic function is ``sigmoid``, ``1 / (1 + exp(-z))`` or ``(1 + tanh(z / 2)) / 2``; the normal one ``erf``,
``erfc`` or ``ndtr``. The tanh form of GELU is the logistic function of ``2 sqrt(2 / pi) (x + 0.044715 x^3)``. A product
in any association is read, what else is in it (what the activation gates) multiplies the result; also the product
written out, ``0.5 x + 0.5 x erf(x / sqrt(2))``. Safe because it is the same formula, without the rounding between its
operations, and where an exponential overflows the operator does not.
"""

from __future__ import annotations

import math
from typing import Any, Iterator, NamedTuple, Sequence

import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis import algebra

TANH = {1: 2 * math.sqrt(2 / math.pi), 3: 2 * math.sqrt(2 / math.pi) * 0.044715}
"""Inside the logistic function, by powers of x."""


class SelfGated(NamedTuple):
    x: fx.Node
    kind: str
    """"swish", "gelu", "gelu_tanh", or "" where ``near`` says what differs."""
    slope: float
    """Of swish: x * sigmoid(slope * x)."""
    number: float
    over: list[fx.Node]
    under: list[fx.Node]
    """What else multiplies and divides."""
    nodes: list[fx.Node]
    near: str = ""


class _Probability(NamedTuple):
    """number * P(by * z), where P is the logistic function or the normal distribution's."""

    normal: bool
    z: fx.Node
    by: float
    number: float


def readings(node: fx.Node, skipped_nodes: Sequence[fx.Node] = ()) -> Iterator[SelfGated]:
    """Every way to read ``node`` as an activation times other factors (a scaled x may be x itself), near misses last;
    the nodes of ``skipped_nodes`` are not looked into."""
    flat = algebra.product(node, skipped_nodes)
    near = []
    for gate, divides in (*((n, False) for n in flat.over), *((n, True) for n in flat.under)):
        p = _probability(gate, divides)
        if p is None:
            continue
        for x in [*(n for n in flat.over if n is not gate), *flat.nodes[1:]]:
            nodes: list[fx.Node] = []
            inside = algebra.polynomial(p.z, x, nodes)
            if not inside or 0 in inside:
                continue
            kind, slope, reason = _kind(p.normal, {power: c * p.by for power, c in inside.items()})
            parts = algebra.product(node, [x, *skipped_nodes])
            rest = _without(_without(parts, gate, divides), x, False)
            if rest is None or (not kind and not reason):
                continue
            result = SelfGated(
                _leaf(parts, x),
                kind,
                slope,
                rest.number * p.number,
                rest.over,
                rest.under,
                [*rest.nodes, gate, *nodes],
                reason,
            )
            if kind:
                yield result
            else:
                near.append(result)
    yield from near


def sums(node: fx.Node, skipped_nodes: Sequence[fx.Node] = ()) -> Iterator[SelfGated]:
    """Every way to read the sum ``node`` as an activation whose product is written out, c x + c x f(x) with f of which
    1 + f is twice a probability.
    """
    for one, other in match.operands(node, *match.ADD):
        if not (match.is_float(one) and match.is_float(other)):
            continue
        plain, bent = algebra.product(one, skipped_nodes), algebra.product(other, skipped_nodes)
        for f in bent.over if not (plain.under or bent.under) else ():
            rest = _without(bent, f, False)
            for n in plain.over:
                rest = _without(rest, n, False)
            p = (
                _distribution(match.uncast(f), bent.number / plain.number, 1.0, False)
                if rest is not None and not rest.over and plain.number
                else None
            )
            for x in plain.over if p is not None else ():
                nodes: list[fx.Node] = []
                inside = algebra.polynomial(p.z, x, nodes)
                kind, slope, reason = (
                    _kind(p.normal, {power: c * p.by for power, c in inside.items()})
                    if inside and 0 not in inside
                    else ("", 1.0, "")
                )
                if kind or reason:
                    left_over = _without(plain, x, False).over
                    yield SelfGated(
                        x,
                        kind,
                        slope,
                        plain.number * p.number,
                        left_over,
                        [],
                        [node, one, other, *plain.nodes, *bent.nodes, f, *nodes],
                        reason,
                    )


def _kind(normal: bool, inside: algebra.Polynomial) -> tuple[str, float, str]:
    """(kind, slope, or what differs)."""
    if normal:
        if _close(inside, {1: 1.0}):
            return "gelu", 1.0, ""
        return (
            "",
            1.0,
            f"erf is taken of {inside[1] * math.sqrt(0.5):g} x, in GELU of x / sqrt(2)" if inside.keys() == {1} else "",
        )
    if inside.keys() == {1}:
        return "swish", inside[1], ""
    if _close(inside, TANH):
        return "gelu_tanh", 1.0, ""
    return (
        "",
        1.0,
        f"tanh is taken of {inside[1] / 2:g} x + {inside[3] / 2:g} x^3, in GELU of {TANH[1] / 2:g} x + {TANH[3] / 2:g} "
        "x^3"
        if inside.keys() == {1, 3}
        else "",
    )


def _close(a: algebra.Polynomial, b: algebra.Polynomial) -> bool:
    return a.keys() == b.keys() and all(math.isclose(a[p], b[p], rel_tol=1e-5) for p in b)


def _probability(n: fx.Node, divides: bool) -> _Probability | None:
    return _distribution(*algebra.affine(n), divides) if match.is_float(n) else None


def _distribution(f: Any, a: float, b: float, divides: bool) -> _Probability | None:
    """``a * f + b`` as a probability."""
    if match.is_call(f, aten.sigmoid.default, aten.special_ndtr.default) and not divides and (b == 0 or b == -a):
        # Both distributions are symmetric: 1 - P(z) is P(-z).
        return _Probability(f.target is aten.special_ndtr.default, f.args[0], -1.0 if b else 1.0, b or a)
    if not match.is_call(
        f,
        aten.exp.default,
        aten.tanh.default,
        aten.erf.default,
        aten.erfc.default,
        aten.special_erf.default,
        aten.special_erfc.default,
    ):
        return None
    z = f.args[0]
    if (
        match.is_call(f, aten.exp.default)
        and match.is_call(match.uncast(z), aten.log_sigmoid.default)
        and b == 0
        and not divides
    ):
        return _Probability(False, match.uncast(z).args[0], 1.0, a)
    if divides:
        return _Probability(False, z, -1.0, 1 / b) if match.is_call(f, aten.exp.default) and a == b != 0 else None
    if match.is_call(f, aten.tanh.default) and abs(a) == abs(b) != 0:
        return _Probability(False, z, 2.0 * a / b, 2 * b)
    if match.is_call(f, aten.erf.default, aten.special_erf.default) and abs(a) == abs(b) != 0:
        return _Probability(True, z, math.sqrt(2) * a / b, 2 * b)
    if match.is_call(f, aten.erfc.default, aten.special_erfc.default) and b == 0:
        return _Probability(True, z, -math.sqrt(2), 2 * a)
    return None


def _without(flat: algebra.Product | None, n: fx.Node, divides: bool) -> algebra.Product | None:
    """``flat`` less one factor; None when it is no factor."""
    side = flat and (flat.under if divides else flat.over)
    at = next((i for i, m in enumerate(side or ()) if m is n or match.same(match.uncast(m), match.uncast(n))), None)
    if at is None:
        return None
    rest = [*side[:at], *side[at + 1 :]]
    return flat._replace(under=rest) if divides else flat._replace(over=rest)


def _leaf(flat: algebra.Product, x: fx.Node) -> fx.Node:
    """The factor that equals ``x``, in the type in which it is multiplied."""
    return next(n for n in flat.over if match.same(match.uncast(n), match.uncast(x)))
