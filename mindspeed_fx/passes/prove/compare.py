"""Whether two tensors are the same function of what they are computed of, at every index.

The difference of the two elements is brought to normal form at free indices. Where it is not zero, indices are parted:
by a divisor that their digits are taken with, and at the bounds of conditions on one index. Denominators that are left
are multiplied away.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Iterator

from mindspeed_fx.passes.prove.functions import power
from mindspeed_fx.passes.prove.integers import size_of
from mindspeed_fx.passes.prove.sums import substitute
from mindspeed_fx.passes.prove.terms import Atom, Poly, TooLarge, add, const, mul, of, poly, scale, sub, variable
from mindspeed_fx.passes.prove.values import Value

MOST_REGIONS = 200
"""Parts of the index space that are looked at one by one."""


@dataclass
class Difference:
    """Where two tensors are not shown to be the same."""

    term: Poly
    """What is left of the difference."""
    where: str
    """The indices, as far as they were parted."""

    def __str__(self) -> str:
        return f"{self.term!r}{f' at {self.where}' if self.where else ''}"


def free_indices(shape: tuple[int, ...]) -> tuple[Poly, ...]:
    return tuple(const(0) if n == 1 else of(variable(f"i{d}", n)) for d, n in enumerate(shape))


def difference(a: Value, b: Value) -> Difference | None:
    """None where ``a`` and ``b`` are the same everywhere."""
    if a.shape != b.shape:
        raise TooLarge(f"shapes {a.shape} and {b.shape}")
    if 0 in a.shape:
        return None
    indices = free_indices(a.shape)
    pending = [(sub(a.at(indices), b.at(indices)), "")]
    for _ in range(MOST_REGIONS):
        if not pending:
            return None
        d, where = pending.pop()
        if not d.terms:
            continue
        parts = _parted(d)
        if parts is not None:
            pending += [(p, f"{where} {text}".strip()) for p, text in parts]
        elif without_denominators(d).terms:
            return Difference(d, where)
    raise TooLarge(f"more than {MOST_REGIONS} regions of indices")


def atoms_of(p: Poly, seen: set | None = None) -> Iterator[Atom]:
    """Every atom in ``p``, inside others too."""
    seen = set() if seen is None else seen
    pending: list[Any] = [p]
    while pending:
        x = pending.pop()
        if isinstance(x, tuple):
            pending += x
        elif isinstance(x, Poly) and x not in seen:
            seen.add(x)
            pending += [a for m in x.terms for a, _ in m]
        elif isinstance(x, Atom) and x not in seen:
            seen.add(x)
            yield x
            pending += x.data


def _is_free(v: Atom) -> bool:
    return v.kind == "var" and v.data[0][0] == "i"


def _single(p: Poly) -> tuple[Atom, Any, Any] | None:
    """(index, factor, rest) where ``p`` is a multiple of one free index and a number."""
    varying = [(m, c) for m, c in p.terms.items() if m]
    if len(varying) == 1 and len(varying[0][0]) == 1 and varying[0][0][0][1] == 1 and _is_free(varying[0][0][0][0]):
        return varying[0][0][0][0], varying[0][1], p.terms.get((), 0)
    return None


def _parted(d: Poly) -> list[tuple[Poly, str]] | None:
    """``d`` in two or more parts of an index's range, or with an index in digits."""
    for a in atoms_of(d):
        if a.kind == "floor" and (one := _single(a.data[0])) is not None:
            v, _, _ = one
            n = a.data[1]
            if size_of(v) % n == 0 and 1 < n < size_of(v):
                high, low = variable(f"{v.data[0]}h", size_of(v) // n), variable(f"{v.data[0]}l", n)
                return [(substitute(d, {v: add(scale(of(high), n), of(low))}), "")]
        if a.kind == "cond" and a.data[0] in ("ge", "eq") and (one := _single(a.data[1])) is not None:
            v, c, k = one
            at = -(k // c) if c > 0 else (k // -c) + 1  # the first place where c v + k changes its sign
            places = [at] if a.data[0] == "ge" else [Fraction(-k, c)]
            if a.data[0] == "eq":
                if places[0].denominator != 1:
                    continue
                places = [int(places[0]), int(places[0]) + 1]
            cuts = sorted({p for p in places if 0 < p < size_of(v)})
            if cuts:
                return [_part(d, v, x, y) for x, y in zip([0, *cuts], [*cuts, size_of(v)])]
    return None


def _part(d: Poly, v: Atom, first: int, end: int) -> tuple[Poly, str]:
    text = f"{v.data[0]} in [{first}, {end})"
    if end - first == 1:
        return substitute(d, {v: const(first)}), text
    part = variable(f"{v.data[0]}'{first}", end - first)
    return substitute(d, {v: add(of(part), const(first))}), text


def without_denominators(d: Poly) -> Poly:
    """``d`` times the denominators of its terms; zero if and only if ``d`` is."""
    for _ in range(8):
        least: dict[Atom, Any] = {}
        for m in d.terms:
            for a, e in m:
                if a.kind == "wrap":
                    least[a] = min(least.get(a, 0), e)
        for a in least:
            exponents = {dict(m).get(a, 0) for m in d.terms}
            if len(exponents) > 1 and all(_is_whole(e - least[a]) for e in exponents):
                d = _multiplied(d, a, least[a])
                break
        else:
            return d
    return d


def _is_whole(e: Any) -> bool:
    return isinstance(e, int) or e.denominator == 1


def _multiplied(d: Poly, a: Atom, least: Any) -> Poly:
    parts = []
    for m, c in d.terms.items():
        e = dict(m).get(a, 0)
        rest = poly({tuple(f for f in m if f[0] is not a): c})
        parts.append(mul(rest, power(a.data[0], int(e - least))))
    return add(*parts)
