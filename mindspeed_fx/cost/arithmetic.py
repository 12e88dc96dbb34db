"""Arithmetic in text: sums, products, divisions and powers of numbers and names, read without running any of it.

    evaluate("2*s0*(s1 + 1)", {"s0": 4, "s1": 7})

Texts come from graphs that caches keep, and from what a user calls sizes. ``sympy.sympify`` runs what it reads.
"""

from __future__ import annotations

import ast
import fractions
import functools
import operator
from typing import Any, Callable, Mapping

import sympy

LONGEST = 100_000
"""Characters of a text."""

LARGEST_POWER = 64
"""Powers of numbers may take longer to compute than anybody waits."""


def _divide(a: Any, b: Any) -> Any:
    exact = isinstance(a, (int, fractions.Fraction)) and isinstance(b, (int, fractions.Fraction))
    return fractions.Fraction(a, b) if exact else a / b


def _power(a: Any, b: Any) -> Any:
    if not isinstance(b, (int, fractions.Fraction, float)) or abs(b) > LARGEST_POWER:
        raise ValueError(f"a power of {b}; valid: numbers up to {LARGEST_POWER}")
    return a**b


_INFIX: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_CALLS: dict[str, Callable[..., Any]] = {
    "Max": sympy.Max,
    "Min": sympy.Min,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "Abs": abs,
}
"""What sympy and torch write as calls."""


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of ``text``.

    Args:
        text: numbers and names, ``+ - * / // % **``, and Max, Min, Mod, floor, ceiling, Abs.
        names: of each name its value: numbers or symbols.

    Raises:
        ValueError: the text is something else, or has a name without a value.
    """
    try:
        return _value(_read(text), names, text)
    except (ArithmeticError, RecursionError) as e:
        raise ValueError(f"{_short(text)} has no value: {e}") from None


def names_of(text: str) -> list[str]:
    """The names in ``text``, in the order of the alphabet.

    Raises:
        ValueError: the text is no Python expression.
    """
    nodes = list(ast.walk(_read(text)))
    functions = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    return sorted({n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in functions})


@functools.lru_cache(1024)
def _read(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters are more than arithmetic has")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ValueError(f"{_short(text)} is no arithmetic: {type(e).__name__}") from None


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _INFIX:
        return _INFIX[type(node.op)](_value(node.left, names, text), _value(node.right, names, text))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand, names, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _CALLS:
            return _CALLS[node.func.id](*(_value(a, names, text) for a in node.args))
    what = f"the name {node.id}" if isinstance(node, ast.Name) else type(node).__name__
    raise ValueError(
        f"{_short(text)} is no arithmetic: it has {what}; valid: numbers, {', '.join(names) or 'no names'}"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}...")
