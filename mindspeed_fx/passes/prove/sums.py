"""Terms that bind an index: sums, largest elements, and functions of whole tensors; and terms put in place of an index.

A sum is taken term by term, and what does not depend on its index goes before it, exp(u + v) parted where v does not;
sums of products with sums are one sum over several indices. What is left, a product under one or more indices, is kept
with the indices named by depth and, of several, in the order whose term was there first: terms that differ in names
alone are one object.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable

from mindspeed_fx.passes.prove import functions
from mindspeed_fx.passes.prove.conditions import (
    at_least_zero,
    conditions_of,
    is_positive,
    is_zero,
    is_zero_real,
    under,
)
from mindspeed_fx.passes.prove.integers import floor_div, size_of
from mindspeed_fx.passes.prove.terms import (
    Atom,
    Poly,
    TooLarge,
    add,
    atom,
    const,
    fresh,
    map_terms,
    mul,
    of,
    poly,
    product,
    scale,
    sub,
    variable,
)

MOST_INDICES = 5
"""Indices of one sum whose order is tried."""


def index(size: Any) -> Poly:
    """A new index of this size as a polynomial; zero where there is one element."""
    return const(0) if size == 1 else of(fresh(size))


def sum_of(size: Any, element: Callable[[Poly], Poly]) -> Poly:
    """The sum of ``element(i)`` for i below ``size``."""
    if size == 0:
        return const(0)
    i = index(size)
    return sum_over(_variable_of(i), element(i)) if i.terms else element(i)


def _variable_of(i: Poly) -> Atom:
    ((mono, _),) = i.terms.items()
    return mono[0][0]


def sum_over(v: Atom, p: Poly) -> Poly:
    """The sum of ``p`` over the index ``v``; conditions on ``v`` alone are bounds of it."""
    p = _in_any_order(v, p)
    if (cut := _first_bound(v, p)) is not None:
        return add(*(_summed_part(v, p, *part) for part in cut))
    parts = []
    for mono, c in p.terms.items():
        outside, inside, indices = const(c), [], [v]
        for a, e in mono:
            if v not in a.free:
                outside = mul(outside, of(a, e))
            elif a.kind == "exp":
                kept = {m: k for m, k in a.data[0].terms.items() if any(v in b.free for b, _ in m)}
                rest = sub(a.data[0], poly(kept))
                outside = mul(outside, functions.exponential(scale(rest, e)))
                inside.append((atom("exp", poly(kept)), e))
            elif a.kind == "sum" and e == 1:
                inner, body = opened(a)
                indices += inner
                inside += body
            else:
                inside.append((a, e))
        if (reduced := _picked(v, inside)) is not None and len(indices) == 1:
            parts.append(mul(outside, reduced))
        elif not inside:
            parts.append(scale(outside, size_of(v)))
        else:
            parts.append(mul(outside, _closed(tuple(indices), product(of(a, e) for a, e in inside))))
    return add(*parts)


PERMUTATIONS = ("order ", "inverse")
"""Beginnings of the names of functions of a whole tensor that are permutations of its places."""


def _in_any_order(v: Atom, p: Poly) -> Poly:
    """``p`` with ``v`` itself where it reads ``v`` through one permutation q alone: the sum of f(q[v]) is that of
    f(v)."""
    for a in sorted(_permuted(v, p), key=lambda a: a.id):
        w = fresh(size_of(v))
        replaced = substitute(p, {v: of(v)}, {a: of(w)})
        if v not in replaced.free:
            return substitute(replaced, {w: of(v)})
    return p


def _permuted(v: Atom, p: Poly) -> set[Atom]:
    """Terms q[v] in ``p``, of permutations of as many places as ``v`` has."""
    results, pending, seen = set(), [a for mono in p.terms for a, _ in mono], set()
    while pending:
        a = pending.pop()
        if a in seen or v not in a.free:
            continue
        seen.add(a)
        if a.kind == "whole" and a.data[0].startswith(PERMUTATIONS) and a.data[2:] == (of(v),):
            mono = next(iter(a.data[1][0].terms), ())
            if [size_of(n) for b, _ in mono if b.kind == "lambda" for n in b.data[0]] == [size_of(v)]:
                results.add(a)
        pending += [b for q in a.data if isinstance(q, Poly) for mono in q.terms for b, _ in mono]
    return results


def _first_bound(v: Atom, p: Poly) -> list[tuple[Atom, bool, int, int]] | None:
    """A condition on ``v`` alone, with its truth and the range of ``v`` where it has it, twice; None without one."""
    for c in sorted(conditions_of(p), key=lambda a: a.id):
        if c.data[0] == "ge" and c.free == frozenset((v,)) and isinstance(size_of(v), int):
            factor, shift = c.data[1].terms.get(((v, 1),), 0), c.data[1].terms.get((), 0)
            if factor and c.data[1] is add(scale(of(v), factor), const(shift)):
                at = -(shift // factor) if factor > 0 else shift // -factor + 1
                return [(c, factor < 0, 0, at), (c, factor > 0, at, size_of(v))]
    return None


def _summed_part(v: Atom, p: Poly, c: Atom, holds: bool, first: int, end: int) -> Poly:
    """The part of a sum in which the condition ``c`` holds, or does not, as ``v`` is in [first, end)."""
    part = under(p, c, holds)
    return sum_of(end - first, lambda i: substitute(part, {v: add(i, const(first))}))


def _picked(v: Atom, inside: list[tuple[Atom, Any]]) -> Poly | None:
    """The only element of a sum that has a factor [v == t]."""
    for a, _ in inside:
        if a.kind == "cond" and a.data[0] == "eq" and abs(a.data[1].terms.get(((v, 1),), 0)) == 1:
            c = a.data[1].terms[((v, 1),)]
            rest = sub(a.data[1], scale(of(v), c))
            if v in rest.free:
                continue
            t = scale(rest, -c)
            body = product(of(b, e) for b, e in inside if b is not a)
            valid = mul(at_least_zero(t), at_least_zero(sub(const(size_of(v) - 1), t)))
            return mul(valid, substitute(body, {v: t}))
    return None


def opened(a: Atom) -> tuple[list[Atom], list[tuple[Atom, Any]]]:
    """The indices of a sum, as new ones, and the factors under it."""
    indices, body = a.data
    new = [fresh(size_of(v)) for v in indices]
    p = substitute(poly({body: 1}), {v: of(n) for v, n in zip(indices, new)})
    if list(p.terms.values()) != [1]:
        raise TooLarge("conditions on two indices of one sum")
    return new, list(next(iter(p.terms)))


def _closed(indices: tuple[Atom, ...], body: Poly) -> Poly:
    """The sum over ``indices`` of a product that depends on each."""
    if len(body.terms) != 1:
        return _one_by_one(indices, body)
    ((mono, c),) = body.terms.items()
    if any(v not in body.free for v in indices):
        return _one_by_one(indices, body)
    if len(indices) > MOST_INDICES:
        raise TooLarge(f"a sum over {len(indices)} indices")
    depth = max(a.height for a, _ in mono) + 1
    candidates = []
    for order in itertools.permutations(sorted(indices, key=lambda v: (str(size_of(v)), v.id))):
        if [str(size_of(v)) for v in order] != sorted(str(size_of(v)) for v in order):
            continue
        names = tuple(variable(f"b{depth}.{i}", size_of(v)) for i, v in enumerate(order))
        renamed = substitute(body, {v: of(n) for v, n in zip(order, names)})
        if list(renamed.terms.values()) != [c]:
            raise TooLarge("conditions on two indices of one sum")
        candidates.append(atom("sum", names, next(iter(renamed.terms)), bound=names))
    return scale(of(min(candidates, key=lambda a: a.id)), c)


def _one_by_one(indices: tuple[Atom, ...], body: Poly) -> Poly:
    for v in indices:
        body = sum_over(v, body)
    return body


def reduced(kind: str, size: Any, element: Callable[[Poly], Poly]) -> Poly:
    """The largest ("amax"), the least ("amin") or the product ("prod") of ``element(i)`` for i below ``size``."""
    i = index(size)
    if not i.terms:
        return element(i)
    v, body = _variable_of(i), element(i)
    if v not in body.free and kind != "prod":
        return body
    return _closed_function(kind, (v,), body)


def _closed_function(kind: str, indices: tuple[Atom, ...], body: Poly) -> Poly:
    names = tuple(variable(f"b{body.height + 1}.{i}", size_of(v)) for i, v in enumerate(indices))
    return of(atom(kind, names, substitute(body, dict(zip(indices, map(of, names)))), bound=names))


def whole(name: str, tensors: list[tuple[tuple[Any, ...], Callable[[tuple], Poly]]], at: tuple[Poly, ...]) -> Poly:
    """Element ``at`` of a function of whole tensors, each given by its shape and its elements, of which nothing else is
    known."""
    closed = []
    for shape, element in tensors:
        indices = tuple(index(n) for n in shape)
        body = element(indices)
        free = tuple(_variable_of(i) for i in indices if i.terms)
        if free:
            closed.append(_closed_function("lambda", free, body))
        else:
            closed.append(body)
    return functions.by_cases(at, lambda q: of(atom("whole", name, tuple(closed), *q)))


# ---------------------------------------------------------------- substitution


def substitute(p: Poly, places: dict[Atom, Poly], known: dict | None = None) -> Poly:
    """``p`` with terms in place of indices, brought to normal form again."""
    if not any(v in p.free for v in places):
        return p
    known = {} if known is None else known
    if p not in known:
        known[p] = map_terms(p, lambda a: _substitute_atom(a, places, known))
    return known[p]


def _substitute_atom(a: Atom, places: dict[Atom, Poly], known: dict) -> Poly:
    if not any(v in a.free for v in places):
        return of(a)
    if a not in known:
        known[a] = _rebuilt(a, places, known)
    return known[a]


def _rebuilt(a: Atom, places: dict[Atom, Poly], known: dict) -> Poly:
    kind, data = a.kind, a.data

    def inner(p: Any) -> Any:
        return substitute(p, places, known) if isinstance(p, Poly) else p

    if kind == "var":
        return places[a]
    if kind == "sum":
        new = [fresh(size_of(v)) for v in data[0]]
        body = poly({data[1]: 1})
        replaced = substitute(body, {**places, **{v: of(n) for v, n in zip(data[0], new)}})
        return _one_by_one(tuple(new), replaced)
    if kind in ("amax", "amin", "prod", "lambda"):
        new = tuple(fresh(size_of(v)) for v in data[0])
        body = substitute(data[1], {**places, **{v: of(n) for v, n in zip(data[0], new)}})
        return _closed_function(kind, new, body)
    if kind == "load":
        return functions.load(data[0], tuple(map(inner, data[1:])), "real")
    if kind == "cond" and data[0] == "load":
        return functions.load(data[1], tuple(map(inner, data[2:])), "bool")
    if kind == "cond":
        return CONDITIONS[data[0]](inner(data[1]))
    if kind == "whole":
        return functions.by_cases(tuple(map(inner, data[2:])), lambda q: of(atom("whole", *data[:2], *q)))
    return FUNCTIONS.get(kind, lambda *args: functions.apply(kind, *args))(*map(inner, data))


CONDITIONS = {"ge": at_least_zero, "eq": is_zero, "gt": is_positive, "zero": is_zero_real}
FUNCTIONS: dict[str, Callable[..., Poly]] = {
    "floor": floor_div,
    "exp": functions.exponential,
    "log": functions.logarithm,
    "sigmoid": functions.sigmoid,
    "sin": functions.sine,
    "cos": functions.cosine,
    "erf": lambda p: functions.odd("erf", p),
    "abs": functions.absolute,
    "wrap": lambda p: p,
    "undefined": lambda p, r: functions.power(p, r),
}
"""How an atom of a kind is made from its data."""
