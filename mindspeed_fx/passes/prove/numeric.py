"""Numbers for terms: a witness that two of them differ.

Inputs are not stored: an element is a hash of its name and place, so that nothing is as large as the model. A term with
a function of which nothing is known has no number.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from mindspeed_fx.passes.prove.compare import atoms_of, free_indices
from mindspeed_fx.passes.prove.integers import size_of
from mindspeed_fx.passes.prove.terms import Atom, Poly
from mindspeed_fx.passes.prove.values import Value

POINTS = 32
"""Places of the tensors that are looked at: the first, the last, and others at random."""
MOST_ELEMENTS = 4_000_000
INFINITY = 1e6
"""Stands for the formal infinity: exp of minus it is zero, and one more or less is still seen."""
TOLERANCE = 1e-7
"""Relative difference of two float64 evaluations that no rounding makes: sums here are of some ten thousand terms."""
SMALL_INTEGERS = 6
SCALES = (1.0, 1e-2)
"""Inputs are of these magnitudes in turn, so that small constants beside them show."""


class NoNumber(Exception):
    """A term that has no number; the text says why."""


class _Numbers:
    def __init__(self, scale: float, environment: dict[Atom, np.ndarray], rank: int, whole: np.ndarray):
        self.scale, self.environment, self.rank, self.whole = scale, environment, rank, whole
        self.known: dict[Any, np.ndarray] = {}

    def of(self, p: Poly) -> np.ndarray:
        if p not in self.known:
            total: Any = np.zeros((1,) * self.rank)
            for m, c in p.terms.items():
                product: Any = np.full((1,) * self.rank, float(c))
                for a, e in m:
                    product = product * self._power(self.atom(a), e)
                total = total + product
            self._small(total)
            self.known[p] = total
        return self.known[p]

    @staticmethod
    def _power(x: np.ndarray, e: Any) -> np.ndarray:
        return x if e == 1 else x ** float(e)

    @staticmethod
    def _small(x: np.ndarray) -> None:
        if x.size > MOST_ELEMENTS:
            raise NoNumber("too many elements")

    def atom(self, a: Atom) -> np.ndarray:
        if a not in self.known:
            self.known[a] = self._atom(a)
        return self.known[a]

    def _atom(self, a: Atom) -> np.ndarray:
        kind, data = a.kind, a.data
        if kind == "var":
            return self.environment[a]
        if kind == "load":
            return self.hashed(data[0], data[1:])
        if kind == "cond" and data[0] == "load":
            return (self.hashed(data[1], data[2:]) > 0).astype(float)
        if kind == "cond":
            return COMPARISONS[data[0]](self.of(data[1])).astype(float)
        if kind == "infinity":
            return np.full((1,) * self.rank, INFINITY)
        if kind == "floor":
            return np.floor(self.of(data[0]) / data[1])
        if kind in ("wrap", "detached"):
            return self.of(data[0])
        if kind == "sum":
            return self.reduced(data[0], lambda inner: _product(inner, data[1]), np.sum)
        if kind in REDUCTIONS:
            return self.reduced(data[0], lambda inner: inner.of(data[1]), REDUCTIONS[kind])
        if kind in FUNCTIONS:
            return FUNCTIONS[kind](*map(self.of, data))
        raise NoNumber(f"a term with {kind}")

    def reduced(self, indices: tuple[Atom, ...], body: Any, reduce: Any) -> np.ndarray:
        k = len(indices)
        places = {v: x[(..., *[None] * k)] for v, x in self.environment.items()}
        for i, v in enumerate(indices):
            shape = [1] * (self.rank + k)
            shape[self.rank + i] = size_of(v)
            places[v] = np.arange(size_of(v), dtype=float).reshape(shape)
        inner = _Numbers(self.scale, places, self.rank + k, self.whole)
        return reduce(body(inner), axis=tuple(range(self.rank, self.rank + k)))

    def hashed(self, name: str, indices: Any) -> np.ndarray:
        """Numbers between -1 and 1 times the scale; of integers one of ``whole``."""
        state: Any = np.full((1,) * self.rank, zlib.crc32(name.encode()), dtype=np.uint64)
        with np.errstate(over="ignore"):
            for i in indices:
                place = np.round(self.of(i)).astype(np.int64).astype(np.uint64)
                state = (state ^ place) * np.uint64(0x9E3779B97F4A7C15)
                state ^= state >> np.uint64(29)
            state = state * np.uint64(0xBF58476D1CE4E5B9)
            state ^= state >> np.uint64(32)
        self._small(state)
        unit = (state >> np.uint64(11)).astype(float) / 2**53
        if name.startswith("integer "):
            return self.whole[np.floor(unit * len(self.whole)).astype(int)]
        return (2 * unit - 1) * self.scale


def _product(numbers: _Numbers, mono: Any) -> np.ndarray:
    result: Any = np.ones((1,) * numbers.rank)
    for a, e in mono:
        result = result * numbers._power(numbers.atom(a), e)
    return result


COMPARISONS = {
    "ge": lambda x: x >= 0,
    "eq": lambda x: x == 0,
    "gt": lambda x: x > 0,
    "zero": lambda x: x == 0,
}
REDUCTIONS = {"amax": np.max, "amin": np.min, "prod": np.prod}
FUNCTIONS: dict[str, Any] = {
    "exp": np.exp,
    "log": np.log,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin,
    "cos": np.cos,
    "abs": np.abs,
    "truncated": np.trunc,
    "floored": np.floor,
    "erf": np.vectorize(math.erf),
    "quotient": lambda x, y: np.floor(x / y),
    "remainder": lambda x, y: np.mod(x, y),
}


def _integers(*sides: Poly) -> np.ndarray:
    """Small integers, and those that conditions of the terms compare with: a target that is ignored, an edge."""
    numbers = set(range(SMALL_INTEGERS))
    for p in sides:
        for a in atoms_of(p):
            if a.kind == "cond" and a.data[0] in ("eq", "ge"):
                numbers |= {sign * int(c) for m, c in a.data[1].terms.items() if not m for sign in (1, -1)}
    return np.array(sorted(numbers), dtype=float)


def witness(a: Value, b: Value) -> str | None:
    """An element that differs, with both of its values; None where none does.

    Raises:
        NoNumber: a term has no number.
    """
    generator = np.random.default_rng(0)
    indices = free_indices(a.shape)
    left, right = a.at(indices), b.at(indices)
    places = {
        next(iter(i.free)): np.array([0, n - 1, *generator.integers(0, n, POINTS - 2)], dtype=float)
        for i, n in zip(indices, a.shape)
        if i.free
    }
    whole = _integers(left, right)
    for scale in SCALES:
        with np.errstate(all="ignore"):
            numbers = _Numbers(scale, places, 1, whole)
            x, y = (np.broadcast_to(numbers.of(p), (POINTS,)) for p in (left, right))
        off = np.abs(x - y) > TOLERANCE * (np.abs(x) + np.abs(y)) + 1e-12 * scale
        off &= np.isfinite(x) & np.isfinite(y)
        if off.any():
            n = int(np.argmax(off))
            at = ", ".join(str(int(places[next(iter(i.free))][n])) if i.free else "0" for i in indices)
            return f"element [{at}] is {x[n]:.9g} before and {y[n]:.9g} after, of inputs of magnitude {scale:g}"
    return None
