"""A tensor as a function from indices to terms."""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

import torch

from mindspeed_fx.passes.fusion.analysis.bands import BLOCKED
from mindspeed_fx.passes.prove.conditions import is_zero, is_zero_real, negate
from mindspeed_fx.passes.prove.functions import apply
from mindspeed_fx.passes.prove.integers import floor_div, remainder
from mindspeed_fx.passes.prove.terms import Poly, add, const, infinity, scale

Indices = tuple[Poly, ...]


class Unsupported(Exception):
    """What no rule describes; the text says what."""


class Value:
    """A tensor: its shape, its type, and ``at``: the term that stands at indices."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, element: Callable[[Indices], Poly]):
        self.shape = tuple(shape)
        self.dtype = dtype
        self._element = element
        self._known: dict[Indices, Poly] = {}

    def at(self, indices: Indices) -> Poly:
        """The element; an index of a dimension of size one is zero whatever it is."""
        indices = tuple(const(0) if n == 1 else i for i, n in zip(indices, self.shape, strict=True))
        if indices not in self._known:
            self._known[indices] = self._element(indices)
        return self._known[indices]

    @property
    def kind(self) -> str:
        """ "real", "integer" or "bool"; a complex number is a real term with the imaginary unit."""
        if self.dtype == torch.bool:
            return "bool"
        return "real" if self.dtype.is_floating_point or self.dtype.is_complex else "integer"


def scalar(c: Any) -> Poly:
    """A number of the graph; a float that blocks scores is minus infinity, as :mod:`fusion.analysis.bands` reads it."""
    if isinstance(c, float):
        if math.isnan(c):
            raise Unsupported("a constant that is not a number")
        if c <= BLOCKED:
            return scale(infinity(), -1)
        if c >= 1e30:
            return infinity()
    if isinstance(c, complex):
        raise Unsupported("a complex constant")
    return const(c)


def value_of(x: Any) -> Value:
    """A Value as it is; a number as one of no dimensions."""
    if isinstance(x, Value):
        return x
    if not isinstance(x, (bool, int, float)):
        raise Unsupported(f"an argument of type {type(x).__name__}")
    dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else torch.float64
    return Value((), dtype, lambda _: scalar(x))


def broadcast(indices: Indices, shape: Sequence[int]) -> Indices:
    """The indices of what broadcasts to where ``indices`` point."""
    return tuple(indices[len(indices) - len(shape) :])


def at_broadcast(x: Value, indices: Indices) -> Poly:
    return x.at(broadcast(indices, x.shape))


def pointwise(out: Any, f: Callable[..., Poly], *args: Any) -> Value:
    """``f`` of the elements of what broadcasts to the shape of ``out``."""
    values = [value_of(a) for a in args]
    return Value(out.shape, out.dtype, lambda i: f(*(at_broadcast(v, i) for v in values)))


def cast(x: Value, dtype: torch.dtype) -> Value:
    """``x`` in another type, of which a term tells kinds alone: rounding is none of its business."""
    target = Value(x.shape, dtype, lambda _: const(0)).kind
    if target == "bool" and x.kind != "bool":
        zero = is_zero if x.kind == "integer" else is_zero_real
        return Value(x.shape, dtype, lambda i: negate(zero(x.at(i))))
    if target == "integer" and x.kind == "real":
        return Value(x.shape, dtype, lambda i: apply("truncated", x.at(i)))
    return Value(x.shape, dtype, x.at)


def nonzero(x: Value) -> Value:
    """``x`` as a condition."""
    return cast(x, torch.bool)


def reindex(indices: Indices, shape: Sequence[int], other: Sequence[int]) -> Indices:
    """Indices into ``shape`` of the element that ``indices`` point to in ``other``, a reshape of it.

    Dimensions are taken in the smallest groups of equal product: in a group the place is one number, taken apart again.
    """
    result: list[Poly] = []
    i = j = 0
    while i < len(shape) or j < len(other):
        m, n = [], []
        size_m = size_n = 1
        while True:
            if size_m <= size_n and i < len(shape) and (size_m < size_n or not m):
                size_m *= shape[i]
                m.append(shape[i])
                i += 1
            elif j < len(other) and (size_n < size_m or not n):
                size_n *= other[j]
                n.append((other[j], indices[j]))
                j += 1
            else:
                break
        if size_m != size_n and size_m * size_n:
            raise Unsupported(f"a view of {tuple(shape)} as {tuple(other)}")
        result += _apart(_together(n), m)
    return tuple(result)


def _together(dims: Sequence[tuple[int, Poly]]) -> Poly:
    flat, stride = const(0), 1
    for n, i in reversed(dims):
        if n != 1:
            flat = add(flat, scale(i, stride))
        stride *= n
    return flat


def _apart(flat: Poly, sizes: Sequence[int]) -> list[Poly]:
    result: list[Poly] = []
    outer = [n for n in sizes if n != 1]
    for n in reversed(sizes):
        if n == 1:
            result.append(const(0))
        else:
            outer.pop()
            result.append(remainder(flat, n) if outer and n else flat)
            flat = floor_div(flat, n) if outer and n else flat
    return result[::-1]


def dimension(d: int, rank: int) -> int:
    return d + rank if d < 0 else d
