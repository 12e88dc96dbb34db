"""Private and moving APIs that the cost model needs, one name each: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

from typing import Any, Callable

import sympy
import torch


def by_target(function: Callable) -> Callable:
    """``function`` of what a node calls, and of whatever else, remembered. By identity: torch hashes an operator in Python, which takes as long as most answers."""
    known: dict[tuple, tuple[Any, Any]] = {}

    def remembered(target: Any, *rest: Any) -> Any:
        found = known.get((id(target), rest))
        if found is None:
            if len(known) > 4096:
                known.clear()
            found = known[id(target), rest] = (target, function(target, *rest))  # the target stays alive, and so its identity its own
        return found[1]

    return remembered


def size_expression(size: Any) -> Any:
    """A dimension as int or sympy expression."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def symbol_hints(size: torch.SymInt) -> dict[sympy.Symbol, int]:
    """The values that the symbols of ``size`` had while tracing; those known only at run time, and those of ragged
    dimensions, which have no number, are missing."""
    env = size.node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {s: int(known[s]) for s in size.node.expr.free_symbols if isinstance(known.get(s), (int, sympy.Integer))}


def group_ranks(name: str) -> list[int] | None:
    """The global ranks of a process group by the name that functional collectives carry; None where there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return dist.get_process_group_ranks(_resolve_process_group(name))
    except (RuntimeError, ValueError, KeyError):
        return None
