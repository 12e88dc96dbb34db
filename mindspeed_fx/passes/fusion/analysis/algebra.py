"""A value read as an expression: a product of factors, a number times something plus a number, a polynomial.

However a formula is associated, commuted or divided, it reads the same here. Casts between floating types are left out:
who rewrites computes in at least the types that the model had.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten

DEEPEST = 8


SUB = (aten.sub.Tensor, aten.sub.Scalar)


EXPANDED = (aten.expand.default, aten.expand_as.default)


class Product(NamedTuple):
    """number * over[0] * over[1] ... / under[0] / under[1] ..."""

    numbers: list[tuple[Any, bool]]
    """Python numbers, constants and symbolic floats, and whether they divide."""
    over: list[fx.Node]
    under: list[fx.Node]
    nodes: list[fx.Node]
    """Every product, quotient and cast that was read."""

    @property
    def number(self) -> float:
        """Asking ties the graph to symbolic floats among the numbers."""
        total = 1.0
        for n, divides in self.numbers:
            total = total / match.number(n) if divides else total * match.number(n)
        return total


def product(n: fx.Node, whole: Sequence[fx.Node] = ()) -> Product:
    """``n`` as a product, down to what is none or equals one of ``whole``."""
    whole = [match.uncast(w) for w in whole]
    read = Product([], [], [], [])

    def walk(n: Any, divides: bool, depth: int) -> None:
        if _constant(n) and not (divides and match.number(n) == 0):
            read.numbers.append((n, divides))
            return
        parts = (
            _factors(n)
            if depth and match.is_float(n) and not any(match.same(match.uncast(n), w) for w in whole)
            else None
        )
        if parts is None:
            (read.under if divides else read.over).append(n)
            return
        read.nodes.append(n)
        for part, inverted in parts:
            walk(part, divides ^ inverted, depth - 1)

    walk(n, False, DEEPEST)
    return read


def _constant(n: Any) -> bool:
    if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), torch.SymFloat):
        return True  # its value is asked for by whoever needs it
    return match.number(n) is not None


def _factors(n: fx.Node) -> list[tuple[Any, bool]] | None:
    """(factor, whether it divides) of one call."""
    if match.is_call(n, *match.MUL) and not n.kwargs:
        return [(n.args[0], False), (n.args[1], False)]
    if match.is_call(n, *match.DIV) and not n.kwargs:
        return [(n.args[0], False), (n.args[1], True)]
    if match.is_call(n, aten.neg.default):
        return [(n.args[0], False), (-1.0, False)]
    if (x := match.reciprocal(n)) is not None:
        return [(x, True)]
    if (
        match.is_call(n, aten.to.dtype, *EXPANDED)
        and match.is_float(n.args[0])
        and match.value(n.args[0]).dim() == match.value(n).dim()
    ):
        return [(n.args[0], False)]
    return None


def linear_step(n: Any) -> tuple[fx.Node, float, float] | None:
    """(x, a, b) when the call ``n`` is a * x + b with numbers a and b."""
    if not isinstance(n, fx.Node) or n.op != "call_function" or n.kwargs:
        return None
    if match.is_call(n, aten.neg.default):
        return n.args[0], -1.0, 0.0
    if (
        match.is_call(n, aten.rsub.Scalar, aten.rsub.Tensor)
        and len(n.args) == 2
        and match.number(n.args[1]) is not None
    ):
        return n.args[0], -1.0, float(match.number(n.args[1]))
    if not match.is_call(n, *match.ADD, *SUB, *match.MUL, *match.DIV) or len(n.args) != 2:
        return None
    for x, arg, swapped in ((*n.args, False), (*n.args[::-1], True)):
        c = match.number(arg)
        if c is None or not isinstance(x, fx.Node):
            continue
        if match.is_call(n, *match.ADD):
            return x, 1.0, float(c)
        if match.is_call(n, *SUB):
            return (x, -1.0, float(c)) if swapped else (x, 1.0, -float(c))
        if match.is_call(n, *match.MUL):
            return x, float(c), 0.0
        return (x, 1 / c, 0.0) if c and not swapped else None
    return None


def affine(n: Any) -> tuple[Any, float, float]:
    """(x, a, b) when ``n`` is a * x + b; (n, 1, 0) at the least."""
    n, a, b = match.uncast(n), 1.0, 0.0
    for _ in range(DEEPEST):
        result = linear_step(n)
        if result is None:
            break
        n, a, b = match.uncast(result[0]), a * result[1], b + a * result[2]
    return n, a, b


Polynomial = dict[int, float]
"""Coefficients by power."""


def polynomial(n: Any, x: fx.Node, nodes: list[fx.Node], depth: int = DEEPEST) -> Polynomial | None:
    """``n`` as a polynomial of ``x``, else None; what is read on the way is added to ``nodes``."""
    if match.same(match.uncast(n), match.uncast(x)):
        return {1: 1.0}
    if match.number(n) is not None:
        return {0: float(match.number(n))}
    if depth == 0 or not match.is_float(n):
        return None
    nodes.append(n)
    again = lambda m: polynomial(m, x, nodes, depth - 1)  # noqa: E731
    if match.is_call(n, aten.to.dtype):
        return again(n.args[0])
    if match.is_call(n, aten.pow.Tensor_Scalar) and n.args[1] in (2, 3):
        inner = again(n.args[0])
        square = _times(inner, inner)
        return square if n.args[1] == 2 else _times(square, inner)
    if match.is_call(n, *match.ADD) and match.number(match.argument(n, "alpha")) not in (1, None):
        return _plus(again(n.args[0]), _times(again(n.args[1]), {0: match.number(match.argument(n, "alpha"))}))
    if result := linear_step(n):
        return _plus(_times(again(result[0]), {0: result[1]}), {0: result[2]})
    for targets, combine in ((match.MUL, _times), (match.ADD, _plus)):
        for a, b in match.operands(n, *targets)[:1]:
            return combine(again(a), again(b))
    return None


def _times(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None:
        return None
    results: Polynomial = {}
    for p, c in a.items():
        for q, d in b.items():
            results[p + q] = results.get(p + q, 0.0) + c * d
    return {p: c for p, c in results.items() if c}


def _plus(a: Polynomial | None, b: Polynomial | None) -> Polynomial | None:
    if a is None or b is None:
        return None
    return {p: c for p in a.keys() | b.keys() if (c := a.get(p, 0.0) + b.get(p, 0.0))}
