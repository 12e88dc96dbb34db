"""Functions of terms, each brought to one spelling: powers, exp, log, sigmoid, and functions that have no law here.

sigmoid(x) stands for 1 / (1 + exp(-x)) and, as 2 sigmoid(2 x) - 1, for tanh; exp(log(x)) is x, and log of a product of
positive numbers the sum of their logarithms.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from mindspeed_fx.passes.prove import conditions, text
from mindspeed_fx.passes.prove.terms import (
    Atom,
    Poly,
    TooLarge,
    add,
    atom,
    const,
    imaginary,
    infinity,
    law,
    leading,
    mul,
    normal_power,
    of,
    poly,
    scale,
    sub,
)

assert text

by_cases = conditions.by_cases

EXPANDED_POWER = 4
"""Highest power of a sum that is multiplied out."""


@law
def power(p: Poly, r: Any) -> Poly:
    """p^r for a whole or broken ``r``."""
    r = normal_power(r)
    if r == 1:
        return p
    if r == 0:
        return const(1)
    if isinstance(r, int) and r > 1 and (len(p.terms) <= 1 or r <= EXPANDED_POWER):
        half = power(p, r // 2)
        return mul(mul(half, half), p) if r % 2 else mul(half, half)
    return by_cases((p,), lambda q: _power(q[0], r))


def _power(p: Poly, r: Any) -> Poly:
    c = p.constant
    if c is not None:
        return _constant_power(c, r)
    if len(p.terms) == 1:
        ((mono, c),) = p.terms.items()
        return _monomial_power(mono, c, r)
    if isinstance(r, int) and r < 0 and (logistic := _logistic(p)) is not None:
        return power(logistic, -r)
    lead = leading(p)
    content = lead if isinstance(r, int) else abs(lead)
    rest, common = _without_common_factor(scale(p, 1 / content), r)
    return mul(scale(of(atom("wrap", rest), r), float(content) ** r if r != -1 else 1 / content), common)


def _constant_power(c: Any, r: Any) -> Poly:
    if c == 0:
        return const(0) if r > 0 else infinity()
    if c < 0 and not isinstance(r, int):
        return of(atom("undefined", const(c), r))
    return const(c**r if isinstance(r, int) and r > 0 else float(c) ** float(r))


def _monomial_power(mono: Any, c: Any, r: Any) -> Poly:
    if isinstance(r, int):
        result = _constant_power(c, r)
        for a, e in mono:
            result = mul(result, atom_power(a, e * r))
        return result
    result, rest = const(float(abs(c)) ** float(r)), []
    for a, e in mono:
        if is_positive_atom(a):
            result = mul(result, atom_power(a, e * r))
        else:
            rest.append((a, e))
    if c > 0 and all(isinstance(e, int) and e % 2 == 0 for _, e in rest):
        for a, e in rest:
            result = mul(result, power(absolute(of(a)), e * r))
    elif c > 0 and len(rest) == 1:
        result = mul(result, atom_power(rest[0][0], rest[0][1] * r))
    else:
        result = mul(result, of(atom("wrap", poly({tuple(rest): 1 if c > 0 else -1})), r))
    return result


def atom_power(a: Atom, e: Any) -> Poly:
    """A power of one atom."""
    e = normal_power(e)
    if a.kind == "exp":
        return exponential(scale(a.data[0], e if isinstance(e, int) else float(e)))
    if a.kind == "cond" and e > 0:
        return of(a)
    if a.kind == "wrap" and isinstance(e, int) and e > 0:
        return power(a.data[0], e)
    if a.kind == "imaginary":
        return (const(1), imaginary(), const(-1), scale(imaginary(), -1))[e % 4]
    return of(a, e)


def _without_common_factor(p: Poly, r: Any) -> tuple[Poly, Poly]:
    """``p`` without the factors that all its terms have, and those to the power ``r``; of a root the positive ones
    alone."""
    monos = [dict(m) for m in p.terms]
    common = {
        a: min(m[a] for m in monos)
        for a in monos[0]
        if a.kind not in ("exp", "cond") and all(a in m for m in monos) and (isinstance(r, int) or is_positive_atom(a))
    }
    common = {a: e for a, e in common.items() if isinstance(e, int)}
    if not common:
        return p, const(1)
    rest, outside = p, const(1)
    for a, e in common.items():
        rest = mul(rest, atom_power(a, -e))
        outside = mul(outside, atom_power(a, e * r))
    return rest, outside


def _logistic(p: Poly) -> Poly | None:
    """sigmoid(-u), scaled, where ``p`` is c (1 + exp(u))."""
    if len(p.terms) != 2 or () not in p.terms:
        return None
    ((mono, c),) = [(m, c) for m, c in p.terms.items() if m]
    if c == p.terms[()] and len(mono) == 1 and mono[0][0].kind == "exp":
        return scale(sigmoid(scale(mono[0][0].data[0], -1)), 1 / c)
    return None


def is_positive_atom(a: Atom) -> bool:
    if a.kind == "sum":
        return all(is_positive_atom(b) or b.kind == "cond" or e % 2 == 0 for b, e in a.data[1])
    if a.kind == "wrap":
        return all(c > 0 and all(is_positive_atom(b) for b, _ in m) for m, c in a.data[0].terms.items())
    return a.kind in ("exp", "sigmoid", "size", "abs")


@law
def exponential(p: Poly) -> Poly:
    return by_cases((p,), lambda q: _exponential(q[0]))


def _exponential(p: Poly) -> Poly:
    factor, rest, turned = const(1), {}, {}
    for m, c in p.terms.items():
        if not m:
            if abs(c) > 600:
                raise TooLarge(f"exp({c:g})")
            factor = scale(factor, math.exp(c) if c else 1)
        elif len(m) == 1 and m[0][0].kind == "infinity":
            return const(0) if c < 0 else infinity()
        elif len(m) == 1 and m[0][0].kind == "log" and m[0][1] == 1 and float(c * 12).is_integer():
            factor = mul(factor, power(m[0][0].data[0], Fraction(c).limit_denominator(12)))
        elif any(a.kind == "imaginary" for a, _ in m):
            turned[tuple(f for f in m if f[0].kind != "imaginary")] = c
        else:
            rest[m] = c
    if turned:
        factor = mul(factor, add(cosine(poly(turned)), mul(imaginary(), sine(poly(turned)))))
    return mul(factor, of(atom("exp", poly(rest)))) if rest else factor


def logarithm(p: Poly) -> Poly:
    return by_cases((p,), lambda q: _logarithm(q[0]))


def _logarithm(p: Poly) -> Poly:
    c = p.constant
    if c is not None:
        return const(math.log(c)) if c > 0 else scale(infinity(), -1)
    if len(p.terms) > 1:
        lead = abs(leading(p))
        return add(of(atom("log", scale(p, 1 / lead))), const(math.log(lead)) if lead != 1 else const(0))
    ((mono, c),) = p.terms.items()
    result = const(math.log(abs(c))) if abs(c) != 1 else const(0)
    rest = []
    for a, e in mono:
        if a.kind == "exp":
            result = add(result, scale(a.data[0], e))
        elif is_positive_atom(a):
            result = add(result, scale(_log_atom(a), float(e)))
        else:
            rest.append((a, e))
    if c > 0 and len(rest) == 1 and (not isinstance(rest[0][1], int) or rest[0][1] % 2):
        return add(result, scale(_log_atom(rest[0][0]), float(rest[0][1])))
    if rest or c < 0:
        result = add(result, of(atom("log", poly({tuple(rest): 1 if c > 0 else -1}))))
    return result


def _log_atom(a: Atom) -> Poly:
    return of(atom("log", a.data[0] if a.kind == "wrap" else of(a)))


def sigmoid(p: Poly) -> Poly:
    return by_cases((p,), lambda q: _sigmoid(q[0]))


def _sigmoid(p: Poly) -> Poly:
    if (c := p.constant) is not None:
        return const(1 / (1 + math.exp(-c))) if abs(c) < 600 else const(c > 0)
    if (sign := conditions.sign_of_infinity(p)) is not None:
        return const(sign > 0)
    return sub(const(1), of(atom("sigmoid", scale(p, -1)))) if leading(p) < 0 else of(atom("sigmoid", p))


def tanh(p: Poly) -> Poly:
    return sub(scale(sigmoid(scale(p, 2)), 2), const(1))


def odd(name: str, p: Poly) -> Poly:
    """A function with f(-x) = -f(x), f(0) = 0."""

    def one(q: Any) -> Poly:
        if not q[0].terms:
            return const(0)
        return scale(apply(name, scale(q[0], -1)), -1) if leading(q[0]) < 0 else apply(name, q[0])

    return by_cases((p,), one)


def even(name: str, p: Poly) -> Poly:
    """A function with f(-x) = f(x)."""
    return by_cases((p,), lambda q: apply(name, scale(q[0], -1) if q[0].terms and leading(q[0]) < 0 else q[0]))


def sine(p: Poly) -> Poly:
    return odd("sin", p)


def cosine(p: Poly) -> Poly:
    return even("cos", p)


def absolute(p: Poly) -> Poly:
    c = p.constant
    return const(abs(c)) if c is not None else even("abs", p)


def apply(name: str, *args: Poly) -> Poly:
    """A function of which nothing is known but its arguments (and its number, of a constant)."""
    known = NUMBERS.get(name)
    constants = [a.constant for a in args]
    if known is not None and all(c is not None for c in constants):
        return const(known(*constants))
    return by_cases(args, lambda q: of(atom(name, *q)))


NUMBERS = {
    "sin": math.sin,
    "cos": math.cos,
    "erf": math.erf,
    "abs": abs,
    "floored": math.floor,
    "ceiled": math.ceil,
    "truncated": math.trunc,
    "detached": lambda c: c,
}
"""Functions without a law -> what they are of a number."""


def maximum(a: Poly, b: Poly) -> Poly:
    """max(a, b), as the one of the two whose condition has a positive sign."""

    def larger(q: Any) -> Poly:
        d = sub(q[0], q[1])
        if not d.terms:
            return q[0]
        if (sign := conditions.sign_of_infinity(d)) is not None:
            return q[0] if sign > 0 else q[1]
        one, other = (q[0], q[1]) if leading(d) > 0 else (q[1], q[0])
        return conditions.choose(conditions.is_positive(sub(one, other)), one, other)

    return by_cases((a, b), larger)


def minimum(a: Poly, b: Poly) -> Poly:
    return scale(maximum(scale(a, -1), scale(b, -1)), -1)


def load(buffer: str, indices: tuple[Poly, ...], kind: str) -> Poly:
    """The element of an input; ``kind`` is "real", "integer" or "bool"."""
    if kind == "bool":
        return by_cases(indices, lambda q: of(atom("cond", "load", buffer, *q)))
    return by_cases(indices, lambda q: of(atom("load", buffer, *q)))
