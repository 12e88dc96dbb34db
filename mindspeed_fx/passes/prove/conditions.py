"""Conditions as polynomials: [c] is one where c holds and zero elsewhere.

``not c`` is 1 - [c], ``c and d`` is [c][d], a choice is b + [c](a - b): the algebraic normal form, which is unique.
A comparison of integers is [p >= 0] with one sign, so that a band mask is one polynomial however it was spelled.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mindspeed_fx.passes.prove.integers import bounds
from mindspeed_fx.passes.prove.terms import (
    Atom,
    Poly,
    TooLarge,
    add,
    atom,
    const,
    law,
    leading,
    mul,
    of,
    poly,
    scale,
    sub,
)

MOST_CASES = 7
"""Conditions that one function's argument may have."""


def negate(c: Poly) -> Poly:
    return sub(const(1), c)


def either(a: Poly, b: Poly) -> Poly:
    return sub(add(a, b), mul(a, b))


def choose(c: Poly, a: Poly, b: Poly) -> Poly:
    """``a`` where ``c``, else ``b``."""
    return add(b, mul(c, sub(a, b)))


def at_least_zero(p: Poly) -> Poly:
    """[p >= 0] of an integer; the sign of the kept form is positive, as not (p >= 0) is -p - 1 >= 0."""
    return by_cases((p,), lambda q: _at_least_zero(q[0]))


def _at_least_zero(p: Poly) -> Poly:
    low, high = bounds(p)
    if low is not None and low >= 0:
        return const(1)
    if high is not None and high < 0:
        return const(0)
    if _varying(p) and leading(_without_constant(p)) < 0:
        return negate(of(atom("cond", "ge", sub(scale(p, -1), const(1)))))
    return of(atom("cond", "ge", p))


def is_zero(p: Poly) -> Poly:
    """[p == 0] of an integer."""
    return by_cases((p,), lambda q: _is_zero(q[0]))


def _is_zero(p: Poly) -> Poly:
    low, high = bounds(p)
    if p.constant is not None:
        return const(p.constant == 0)
    if (low is not None and low > 0) or (high is not None and high < 0):
        return const(0)
    if low == 0:
        return negate(at_least_zero(sub(p, const(1))))
    if high == 0:
        return at_least_zero(p)
    return of(atom("cond", "eq", p if leading(p) > 0 else scale(p, -1)))


def is_positive(p: Poly) -> Poly:
    """[p > 0] of a real number."""
    return by_cases((p,), lambda q: _is_positive(q[0]))


def _is_positive(p: Poly) -> Poly:
    if (c := p.constant) is not None:
        return const(c > 0)
    if (sign := sign_of_infinity(p)) is not None:
        return const(sign > 0)
    return of(atom("cond", "gt", scale(p, 1 / abs(leading(p)))))


def is_zero_real(p: Poly) -> Poly:
    """[p == 0] of a real number; a finite one is no infinity."""
    return by_cases((p,), lambda q: _is_zero_real(q[0]))


def _is_zero_real(p: Poly) -> Poly:
    if (c := p.constant) is not None:
        return const(c == 0)
    if sign_of_infinity(p) is not None:
        return const(0)
    return of(atom("cond", "zero", scale(p, 1 / leading(p))))


def sign_of_infinity(p: Poly) -> int | None:
    c = p.terms.get(((atom("infinity"), 1),))
    return None if c is None else (1 if c > 0 else -1)


def _without_constant(p: Poly) -> Poly:
    return poly({m: c for m, c in p.terms.items() if m})


def _varying(p: Poly) -> bool:
    return any(p.terms)


@law
def strictest(conds: Sequence[Atom]) -> list[Atom] | None:
    """Conditions whose product is that of ``conds``: of [p + a >= 0] and [p + b >= 0] the one that implies the other;
    None where two of them exclude each other."""
    if len(conds) < 2:
        return list(conds)
    least: dict[Any, tuple[Any, Atom]] = {}
    equal: dict[Any, Any] = {}
    result = []
    for c in conds:
        if c.data[0] == "ge":
            p = c.data[1]
            base, shift = _without_constant(p), p.terms.get((), 0)
            if base not in least or shift < least[base][0]:
                least[base] = (shift, c)
        else:
            if c.data[0] == "eq":
                base, shift = _without_constant(c.data[1]), c.data[1].terms.get((), 0)
                if equal.setdefault(base, shift) != shift:
                    return None
            result.append(c)
    return result + [c for _, c in least.values()]


def conditions_of(p: Poly) -> set[Atom]:
    """The conditions that ``p`` is a polynomial of."""
    return {a for m in p.terms for a, _ in m if a.kind == "cond"}


def under(p: Poly, c: Atom, holds: bool) -> Poly:
    """``p`` where ``c`` holds, or where it does not."""
    terms: dict = {}
    for m, k in p.terms.items():
        if any(a is c for a, _ in m):
            if not holds:
                continue
            m = tuple(f for f in m if f[0] is not c)
        terms[m] = terms.get(m, 0) + k
    return poly(terms)


@law
def by_cases(polys: Sequence[Poly], f: Callable[[Sequence[Poly]], Poly]) -> Poly:
    """``f(polys)``, which has a value for every case of the conditions in its arguments:
    f(c) = f(0) + [c] (f(1) - f(0))."""
    conds = set().union(*(conditions_of(p) for p in polys)) if polys else set()
    if not conds:
        return f(polys)
    if len(conds) > MOST_CASES:
        raise TooLarge(f"a function of {len(conds)} conditions")
    c = min(conds, key=lambda a: a.id)
    no = by_cases([under(p, c, False) for p in polys], f)
    yes = by_cases([under(p, c, True) for p in polys], f)
    return add(no, mul(of(c), sub(yes, no)))
