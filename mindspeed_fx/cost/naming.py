"""Numbers back to names: the sizes of a graph as expressions in what the user calls them."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Mapping

import sympy

from mindspeed_fx.cost.arithmetic import evaluate, names_of


def naming(names: Mapping[str, int]) -> Callable[[Any], Any]:
    """Size -> expression: see :meth:`mindspeed_fx.cost.graph.Estimate.expression`."""
    arguments = {
        sympy.sympify(evaluate(k, {s: sympy.Symbol(s, positive=True) for s in names_of(k)}), strict=True): int(v)
        for k, v in names.items()
    }
    by_value: dict[int, sympy.Expr] = {}
    for expression, value in arguments.items():
        if value < 2:
            raise ValueError(f"{expression} is {value}: a size of 1 cannot be told from any other 1; use a larger one")
        if value in by_value:
            raise ValueError(f"{by_value[value]} and {expression} are both {value}: give the graph sizes that differ")
        by_value[value] = expression
    plain = [(e, v) for e, v in arguments.items() if e.is_Symbol]
    products: dict[int, sympy.Expr] = {}
    for count in (2, 3):
        for chosen in itertools.combinations(plain, count):
            value = 1
            for _, v in chosen:
                value *= v
            products.setdefault(value, sympy.Mul(*(e for e, _ in chosen)))
    return lambda n: by_value.get(n, products.get(n, n)) if isinstance(n, int) else n
