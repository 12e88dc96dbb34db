"""Integers in terms: the range of an index expression, and quotients of them rounded down.

A remainder is written p - n * floor(p / n), so that taking an index apart and putting it together again is nothing.
"""

from __future__ import annotations

import math
from typing import Any

from mindspeed_fx.passes.prove.terms import LAWS, Atom, Mono, Poly, add, atom, const, of, poly, scale, sub

Range = tuple[Any, Any]
"""Least and largest value; None where not known."""


def size_of(v: Atom) -> Any:
    """The size of a variable's range."""
    return v.data[1]


def bounds(p: Poly) -> Range:
    """The range of an index expression."""
    for m in p.terms:  # a remainder is smaller than its divisor, which its terms one by one do not show
        if len(m) == 1 and m[0][0].kind == "floor" and m[0][1] == 1:
            inner, n = m[0][0].data
            c = p.terms[m]
            if c % n == 0 and len(inner.terms) <= len(p.terms):
                rest = sub(p, scale(sub(inner, scale(of(m[0][0]), n)), -(c // n)))
                if len(rest.terms) < len(p.terms):
                    low, high = bounds(rest)
                    ends = sorted((0, -(c // n) * (n - 1)))
                    return (None if low is None else low + ends[0], None if high is None else high + ends[1])
    low: Any = 0
    high: Any = 0
    for m, c in p.terms.items():
        a, b = _monomial_range(m)
        if c < 0:
            a, b = b, a
        low = None if low is None or a is None else low + c * a
        high = None if high is None or b is None else high + c * b
    return low, high


def _monomial_range(m: Mono) -> Range:
    if not m:
        return 1, 1
    low, high = 1, 1
    for a, e in m:
        lo, hi = _atom_range(a)
        if e != 1 or lo is None or lo < 0:
            return None, None
        low *= lo
        high = None if high is None or hi is None else high * hi
    return low, high


def _atom_range(a: Atom) -> Range:
    if a.kind == "var":
        return 0, (size_of(a) - 1 if isinstance(size_of(a), int) else None)
    if a.kind == "size":
        return 1, None
    if a.kind == "cond":
        return 0, 1
    if a.kind == "floor":
        low, high = bounds(a.data[0])
        return None if low is None else math.floor(low / a.data[1]), None if high is None else high // a.data[1]
    return None, None


def floor_div(p: Poly, n: int) -> Poly:
    """floor(p / n) of an integer."""

    return p if n == 1 else LAWS["by_cases"]((p,), lambda q: _floor_div(q[0], n))


def _floor_div(p: Poly, n: int) -> Poly:
    whole = poly({m: c // n for m, c in p.terms.items() if m and c % n == 0})
    rest = poly({m: c for m, c in p.terms.items() if not m or c % n})
    if rest.terms:
        low, high = bounds(rest)
        if low is not None and high is not None and low // n == high // n:
            return add(whole, const(low // n))
    else:
        return whole
    shift = rest.terms.get((), 0) // n
    rest = sub(rest, const(shift * n))
    low, high = bounds(rest)
    if low is not None and high is not None and low // n == high // n:
        return add(whole, const(shift + low // n))
    if len(rest.terms) == 1:
        ((m, c),) = rest.terms.items()
        if c == 1 and len(m) == 1 and m[0][0].kind == "floor" and m[0][1] == 1:  # floor(floor(p / a) / b)
            inner, a = m[0][0].data
            return add(whole, const(shift), floor_div(inner, a * n))
        if n % c == 0 and c > 1:  # floor(c * m / n) = floor(m / (n / c))
            return add(whole, const(shift), floor_div(poly({m: 1}), n // c))
    # The part that is a multiple of a divisor of n, with what is smaller than it beside, decides alone.
    for step in sorted({abs(c) for m, c in rest.terms.items() if m and isinstance(c, int)}, reverse=True):
        if step > 1 and n % step == 0:
            large = poly({m: c for m, c in rest.terms.items() if m and c % step == 0})
            small = sub(rest, large)
            low, high = bounds(small)
            if low is not None and high is not None and 0 <= low and high < step:
                return add(whole, const(shift), floor_div(_divided(large, step), n // step))
    return add(whole, const(shift), of(atom("floor", rest, n)))


def _divided(p: Poly, n: int) -> Poly:
    return poly({m: c // n for m, c in p.terms.items()})


def remainder(p: Poly, n: int) -> Poly:
    """p - n * floor(p / n)."""
    return sub(p, scale(floor_div(p, n), n))
