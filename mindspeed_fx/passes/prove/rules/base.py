"""The table of rules: what an operator of ATen computes, element by element."""

from __future__ import annotations

from typing import Any, Callable

RULES: dict[str, Callable[..., Any]] = {}
"""Operator ("aten.add", all its overloads) -> ``rule(out, *args, **kwargs)``, with values for tensors, that gives what
stands in the fake result ``out``: a Value, or a tuple of them. A rule raises Unsupported for what it does not know."""


def rule(*names: str) -> Callable[[Callable], Callable]:
    def wrap(f: Callable) -> Callable:
        RULES.update({f"aten.{name}": f for name in names})
        return f

    return wrap
