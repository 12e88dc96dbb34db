"""What stands in one element of a tensor, as a polynomial in normal form.

A :class:`Poly` is a sum of coefficients times monomials; a monomial is a product of powers of :class:`Atom`; an atom
is a variable (an index), an element of an input, a function of polynomials, a condition or a sum over an index. Both
are kept once (equal ones are one object), so that equal normal forms are found by identity. The algebra is that of the
real numbers wherever both sides are defined: types round in no term, a quotient's denominator is not zero.

Worked example: the mean square of four elements is ``sum(b0 < 4: x[b0]^2) * 0.25``; with eps added and a root taken
of it, ``wrap(sum(...) * 0.25 + 1e-5)`` to the power -1/2, times ``x[i]``.
"""

from __future__ import annotations

import bisect
import itertools
import zlib
from fractions import Fraction
from typing import Any, Callable, Iterable

Number = int | float
Mono = tuple[tuple["Atom", Any], ...]

MOST_TERMS = 3000
"""Monomials of one polynomial; beyond it a term is given up."""
RELATIVE = 1e-11
"""Constants that differ by less are one: the same number, computed in two orders in float64."""

LAWS: dict[str, Callable[..., Any]] = {}
"""Functions of the files above this one that a product needs, by name: they are written with products themselves."""


def law(function: Callable) -> Callable:
    """Make ``function`` known to products."""
    LAWS[function.__name__] = function
    return function


class TooLarge(Exception):
    """A term outgrew what is worth expanding; the text says which."""


class Atom:
    """What a polynomial is a polynomial of; made by :func:`atom` alone."""

    __slots__ = ("kind", "data", "id", "free", "height", "order")

    def __init__(self, kind: str, data: tuple, number: int, free: frozenset, height: int):
        self.kind, self.data, self.id, self.free, self.height = kind, data, number, free, height
        self.order: Any = None

    def __repr__(self) -> str:

        return LAWS["atom_text"](self)


class Poly:
    """A sum of coefficients times monomials; made by :func:`poly` alone."""

    __slots__ = ("terms", "id", "free", "height", "order")

    def __init__(self, terms: dict[Mono, Number], number: int, free: frozenset, height: int):
        self.terms, self.id, self.free, self.height = terms, number, free, height
        self.order: Any = None

    @property
    def constant(self) -> Number | None:
        """The number that this is; None where it is none."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    def __repr__(self) -> str:

        return LAWS["poly_text"](self)


_ATOMS: dict[tuple, Atom] = {}
_POLYS: dict[frozenset, Poly] = {}
_CONSTANTS: list[float] = []
_COUNTER = itertools.count()
NOTHING: frozenset = frozenset()


def size_of_tables() -> int:
    """How many terms are kept."""
    return len(_ATOMS) + len(_POLYS)


def forget() -> None:
    """Drop every term: those of before and those of after are never met together."""
    _ATOMS.clear()
    _POLYS.clear()
    _CONSTANTS.clear()


def number(c: Number) -> Number:
    """``c``, or the constant already known that differs from it by rounding alone."""
    if isinstance(c, int):
        return c
    if c == round(c) and abs(c) < 2**53:
        return int(c)
    i = bisect.bisect_left(_CONSTANTS, c)
    for near in _CONSTANTS[max(i - 1, 0) : i + 1]:
        if abs(near - c) <= RELATIVE * abs(c):
            return near
    _CONSTANTS.insert(i, c)
    return c


def _union(parts: Iterable[Any]) -> tuple[frozenset, int]:
    free, height = NOTHING, 0
    for p in parts:
        if isinstance(p, (Poly, Atom)):
            free, height = free | p.free if p.free else free, max(height, p.height)
        elif isinstance(p, tuple):
            inner, tall = _union(p)
            free, height = free | inner if inner else free, max(height, tall)
    return free, height


def atom(kind: str, *data: Any, bound: tuple[Atom, ...] = ()) -> Atom:
    """The one atom of this kind and data; ``bound`` are the variables that it binds."""
    key = (kind, *data)
    if key not in _ATOMS:
        free, height = _union(data)
        if bound:
            free, height = free - frozenset(bound), height + 1
        result = Atom(kind, data, next(_COUNTER), free, height)
        if kind == "var":
            result.free = frozenset((result,))
        _ATOMS[key] = result
    return _ATOMS[key]


def poly(terms: dict[Mono, Number]) -> Poly:
    """The one polynomial of these terms; zeros are left out."""
    terms = {m: number(c) for m, c in terms.items() if c != 0}
    if len(terms) > MOST_TERMS:
        raise TooLarge(f"a sum of more than {MOST_TERMS} products")
    key = frozenset(terms.items())
    if key not in _POLYS:
        free, height = _union(a for m in terms for a, _ in m)
        _POLYS[key] = Poly(terms, next(_COUNTER), free, height)
    return _POLYS[key]


def const(c: Number | bool) -> Poly:
    return poly({(): float(c) if isinstance(c, float) else int(c)})


def of(a: Atom, power: Any = 1) -> Poly:
    """An atom, or a power of one, as a polynomial."""
    return poly({((a, power),): 1})


def add(*polys: Poly) -> Poly:
    """The sum; what cancels up to rounding is gone."""
    if len(polys) == 2 and not polys[1].terms:
        return polys[0]
    terms: dict[Mono, Number] = {}
    for p in polys:
        for m, c in p.terms.items():
            if m in terms:
                total = terms[m] + c
                terms[m] = 0 if abs(total) <= RELATIVE * max(abs(terms[m]), abs(c)) else total
            else:
                terms[m] = c
    return poly(terms)


def scale(p: Poly, c: Number) -> Poly:
    return p if c == 1 else poly({m: k * c for m, k in p.terms.items()})


def sub(p: Poly, q: Poly) -> Poly:
    return add(p, scale(q, -1))


def mul(p: Poly, q: Poly) -> Poly:
    """The product, expanded."""
    for one, other in ((p, q), (q, p)):
        if (c := one.constant) is not None:
            return scale(other, c)
    if len(p.terms) * len(q.terms) > 4 * MOST_TERMS:
        raise TooLarge(f"a product of sums of {len(p.terms)} and {len(q.terms)}")
    parts = []
    for m, c in p.terms.items():
        for n, k in q.terms.items():
            parts.append(scale(_product(m, n), c * k))
    return add(*parts)


def product(polys: Iterable[Poly]) -> Poly:
    result = const(1)
    for p in polys:
        result = mul(result, p)
    return result


def normal_power(e: Any) -> Any:
    """An exponent: an int where it is whole, else a Fraction."""
    e = Fraction(e).limit_denominator(64) if isinstance(e, float) else e
    return int(e) if isinstance(e, Fraction) and e.denominator == 1 else e


SPECIAL = ("cond", "exp", "wrap", "imaginary")
"""Kinds of atoms whose powers obey a law of their own."""


def _product(m: Mono, n: Mono) -> Poly:
    powers: dict[Atom, Any] = dict(m)
    for a, e in n:
        powers[a] = powers.get(a, 0) + e
    if not any(a.kind in SPECIAL for a in powers):
        return poly({_ordered(powers): 1})
    return _with_laws(powers)


def _ordered(powers: dict[Atom, Any]) -> Mono:
    return tuple(sorted(((a, normal_power(e)) for a, e in powers.items() if e != 0), key=lambda f: f[0].id))


def _with_laws(powers: dict[Atom, Any]) -> Poly:
    """A product with atoms of kinds in :data:`SPECIAL`: [c]^2 = [c], exp(u) exp(v) = exp(u + v), i^2 = -1, and whole
    powers of a sum are expanded."""
    plain: dict[Atom, Any] = {}
    others: list[Poly] = []
    conds: list[Atom] = []
    exponents: list[Poly] = []
    sign = 1
    for a, e in powers.items():
        if e == 0:
            continue
        if a.kind == "cond":
            conds.append(a)
        elif a.kind == "exp":
            exponents.append(scale(a.data[0], e if isinstance(e, int) else float(e)))
        elif a.kind == "imaginary":
            sign = -1 if e % 4 in (2, 3) else 1
            if e % 2:
                plain[a] = 1
        elif a.kind == "wrap" and e > 0 and normal_power(e) == int(e):
            others.append(LAWS["power"](a.data[0], int(e)))
        else:
            plain[a] = e
    kept = LAWS["strictest"](conds)
    if kept is None:
        return const(0)
    plain.update(dict.fromkeys(kept, 1))
    if len(exponents) == 1 and exponents[0].constant is None:
        exp = LAWS["exponential"](exponents[0])
    else:
        exp = LAWS["exponential"](add(*exponents)) if exponents else const(1)
    if len(exp.terms) == 1 and not others:
        (mono, c), *_ = exp.terms.items()
        if len(mono) == 1 and mono[0][0].kind == "exp" and mono[0][1] == 1:
            plain[mono[0][0]] = 1
            return poly({_ordered(plain): c * sign})
    result = poly({_ordered(plain): sign})
    for p in (exp, *others):
        result = mul(result, p)
    return result


# ---------------------------------------------------------------- variables and elements

_FRESH = itertools.count()


def variable(name: str, size: Any) -> Atom:
    """An index from 0 to ``size`` - 1."""
    return atom("var", name, size)


def fresh(size: Any) -> Atom:
    """A variable that no term has yet."""
    return variable(f"v{next(_FRESH)}", size)


def imaginary() -> Poly:
    return of(atom("imaginary"))


def infinity() -> Poly:
    """The formal infinity: minus it in an exponent is zero, and what is added to it and taken away cancels."""
    return of(atom("infinity"))


def leading(p: Poly) -> Number:
    """The coefficient of one monomial, the same one for every multiple of ``p`` and however its indices are named."""
    return p.terms[min(p.terms, key=lambda m: (not m, *(_order_of_mono(m))))]


def _order_of_mono(m: Mono) -> tuple:
    return tuple(sorted((order_of(a), float(e)) for a, e in m))


def order_of(x: Atom | Poly) -> tuple:
    """A key to sort terms by. Outer indices come before inner ones, so that closing a sum, which renames its index,
    changes no order."""
    if x.order is None:
        if isinstance(x, Poly):
            x.order = tuple(sorted((_order_of_mono(m), float(c)) for m, c in x.terms.items()))
        elif x.kind == "var":
            x.order = ("var", str(x.data[1]), _place_of(x.data[0]), ())
        else:
            leaves, spec = [], []
            pending = list(x.data)
            while pending:
                d = pending.pop(0)
                if isinstance(d, tuple):
                    pending = [*d, *pending]
                elif isinstance(d, (Atom, Poly)):
                    leaves.append(order_of(d))
                else:
                    spec.append(str(d))
            x.order = (x.kind, " ".join(spec), (0, 0.0, 0), tuple((n,) for n in leaves))
    return x.order


def _place_of(name: str) -> tuple:
    if name[0] == "v":
        return 1, float(name[1:]), 0
    if name[0] == "b":
        depth, position = name[1:].split(".")
        return 2, -float(depth), int(position)
    return 0, float(zlib.crc32(name.encode())), 0


def depends(p: Poly | Atom, v: Atom) -> bool:
    return v in p.free


def map_terms(p: Poly, f: Callable[[Atom], Poly]) -> Poly:
    """``p`` with ``f(atom)`` for every atom."""
    parts = []
    for m, c in p.terms.items():
        factor = const(1)
        for a, e in m:
            factor = mul(factor, LAWS["power"](f(a), e))
        parts.append(scale(factor, c))
    return add(*parts)
