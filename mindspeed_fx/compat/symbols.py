"""Symbolic sizes: as expressions, their values while tracing, and what is known of them for every size."""

from __future__ import annotations

import contextlib
import functools
import operator
import re
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import sympy
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat.fake import hint


def statically_known_true(condition: object) -> bool:
    """``condition``, a bool or a symbolic one, where it holds for every size without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true as known

    return known(condition)


def are_known_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two lists of sizes are as long and the same, whatever the sizes are; adds no guard."""
    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other))


@functools.cache
def allow_systems_of_any_number() -> None:
    """The fake value of ``linalg.solve_triangular`` (torch 2.13) expands what needs no expanding, for it takes a list
    of sizes for another than the same tuple, and fails at that where a size in front is a symbol."""
    from torch import _meta_registrations

    broadcast = getattr(_meta_registrations, "_linalg_broadcast_batch_dims_name", None)
    if broadcast is None:
        return

    @functools.wraps(broadcast)
    def broadcast_unless_equal(one: torch.Tensor, other: torch.Tensor, name: str | None) -> Any:
        if name is None and are_known_equal(one.shape[:-2], other.shape[:-2]):
            return one, other
        return broadcast(one, other, name)

    _meta_registrations._linalg_broadcast_batch_dims_name = broadcast_unless_equal


def guard_or_false(condition: object) -> bool:
    """``condition``, a bool or a symbolic one: with a guard where callers choose sizes, False where only data tell."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false as known

    return known(condition)


def undecided_by_data() -> Any:
    """The exception that torch raises where a condition is asked for that only data tell; its ``cond`` is which."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def size_expression(size: Any) -> Any:
    """A dimension as int or sympy expression."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def as_number(size: Any) -> Any:
    """A dimension that is no symbol any more, for a guard has made it a number, as int; others as they are."""
    is_symbol = isinstance(size, torch.SymInt) and (is_known_by_data(size) or size.node.expr.free_symbols)
    return size if is_symbol else int(size)


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are one expression, or have the same values at three samples of their symbols: sympy leaves
    ``s**2 // s`` as it is, which products of heads in five dimensions have. Adds no guard.
    """
    if str(a) == str(b):
        return True
    if any(isinstance(x, torch.SymInt) and not hasattr(x.node, "expr") for x in (a, b)):
        return False
    first, second = (x.node.expr if isinstance(x, torch.SymInt) else sympy.Integer(x) for x in (a, b))
    free = sorted(first.free_symbols | second.free_symbols, key=str)
    samples = ({s: at + 3 * i for i, s in enumerate(free)} for at in (2, 7, 12))
    return bool(free) and all(first.subs(sample) == second.subs(sample) for sample in samples)


def as_sample(size: Any) -> int:
    """A dimension as a number: one of which data or callers decide at a sample of its symbols, a prime of its own for
    each, so that sizes divide one another by chance only where they are large. Adds no guard."""
    expression = size_expression(size)
    if not isinstance(expression, sympy.Expr):
        return expression
    names = {s: (s.name[0], int(re.sub(r"\D", "", s.name) or 0)) for s in expression.free_symbols}
    return int(expression.subs({s: sympy.prime(1000 + 2 * n + (kind == "s")) for s, (kind, n) in names.items()}))


def float_value(number: torch.SymFloat) -> float | None:
    """What a number that is an input was while tracing: a guard ties the graph to it, at once or, within
    :func:`noting_floats`, where it turns out to matter. None of one that data decides."""
    if not isinstance(number.node.hint, float):
        return None
    if _NOTED is None:
        return float(number)
    _NOTED.append(number)
    return number.node.hint


@contextlib.contextmanager
def noting_floats() -> Iterator[list[torch.SymFloat]]:
    """Meanwhile numbers that are asked for are put into the list that this gives; :func:`tie_floats` adds the guards of
    those of which something was made."""
    global _NOTED
    before, _NOTED = _NOTED, []
    try:
        yield _NOTED
    finally:
        _NOTED = before


def tie_floats(numbers: list[torch.SymFloat]) -> None:
    """Tie the graph to the values that ``numbers`` had while tracing."""
    for number in numbers:
        float(number)


_NOTED: list[torch.SymFloat] | None = None


@contextlib.contextmanager
def equal_sizes_once() -> Iterator[None]:
    """Meanwhile a symbolic size that is computed again while ``make_fx`` records is what was computed first. A DTensor
    makes sizes and strides of the whole from those of its part, and back, for every operator: a recorder that works out
    such a chain when its end is needed calls itself once for each link, and a layer of torch.nn is enough to reach
    Python's limit.
    """
    from torch.fx.experimental import proxy_tensor

    own = proxy_tensor.ProxyTorchDispatchMode.__sym_dispatch__

    @functools.wraps(own)
    def dispatch(mode: Any, *arguments: Any) -> Any:
        out = own(mode, *arguments)
        if not isinstance(out, torch.SymInt) or out.node.is_nested_int():
            return out
        return vars(mode).setdefault("_mindspeed_fx_sizes", {}).setdefault(out.node.expr, out)

    with mock.patch.object(proxy_tensor.ProxyTorchDispatchMode, "__sym_dispatch__", dispatch):
        yield


def symbol_hints(size: torch.SymInt) -> dict[sympy.Symbol, int]:
    """The values that the symbols of ``size`` had while tracing; those known only at run time, and those of ragged
    dimensions, which have no number, are missing."""
    env = size.node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return {s: int(known[s]) for s in size.node.expr.free_symbols if isinstance(known.get(s), (int, sympy.Integer))}


def is_known_by_data(size: Any) -> bool:
    """Whether a dimension is a number that only data tell while the program runs, such as the length of ``x[mask]``, or
    one that differs among the ranks of one process; not one that callers choose."""
    if not isinstance(size, torch.SymInt):
        return False
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return not hasattr(size.node, "expr") or bool(free_unbacked_symbols(size))


@contextlib.contextmanager
def without_guards(gm: fx.GraphModule) -> Iterator[None]:
    """Comparisons of sizes of ``gm`` are answered for those that it was traced with, and decide nothing that runs: no
    guard is added."""
    env = next((e for n in gm.graph.nodes if (e := _shape_env(n.meta.get("val"))) is not None), None)
    with contextlib.nullcontext() if env is None else env.suppress_guards():
        yield


def _shape_env(value: Any) -> Any:
    sizes = [value] if isinstance(value, torch.SymInt) else value.shape if isinstance(value, torch.Tensor) else ()
    return next((s.node.shape_env for s in sizes if isinstance(s, torch.SymInt)), None)


def untraced(function: Callable) -> Callable:
    """Decorator: what ``function`` computes of sizes decides, and is no part of the program that is traced; sizes of
    the captured graph are not known to the trace."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

        with disable_proxy_modes_tracing():
            return function(*args, **kwargs)

    return run


def multiply_two_at_a_time() -> None:
    """A size that was computed outside of a trace torch (2.13) makes anew of the trace's own, a product of three as one
    call of ``operator.mul``, which takes two: the call fails, or the code that is written of it leaves the third out;
    and no square. From here on products and powers are made of products of two; nothing else changes."""
    from torch.fx.experimental import proxy_tensor

    own = getattr(proxy_tensor, "_build_proxy_for_sym_expr", None)
    register = getattr(proxy_tensor, "_sym_register", None)
    if own is None or register is None or getattr(own, "_two_at_a_time", False):
        return

    @functools.wraps(own)
    def build(tracer: Any, expr: Any, out: Any = None) -> Any:
        two = _two_factors(expr)
        if two is None or expr in getattr(tracer, "sympy_expr_tracker", {}):
            return own(tracer, expr, out)
        factors = [build(tracer, factor) for factor in two]
        if any(f is None for f in factors):
            return None
        if out is None:
            return operator.mul(*factors)
        register(tracer, operator.mul, factors, out)
        return out

    build._two_at_a_time = True  # type: ignore[attr-defined]
    proxy_tensor._build_proxy_for_sym_expr = build


def _two_factors(expr: Any) -> tuple[Any, Any] | None:
    """Two expressions whose product is ``expr``, of three factors or more or a power; None for other expressions."""
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 1:
        return expr.base, expr.base ** (expr.exp - 1)
    if not isinstance(expr, sympy.Mul) or len(expr.args) < 3:
        return None
    first, *rest = expr.args
    return first, sympy.Mul(*rest)


def price_sizes_as_traced() -> None:
    """DTensor (2.13) compares prices of what it may send; of symbols such a comparison is a guard, and another size
    makes the program anew though nothing but a price differs. From here on a size is priced as it was traced."""
    from torch.distributed.tensor import _collective_utils as costs

    own = getattr(costs, "spec_to_bytes", None)
    if own is None or getattr(own, "_as_traced", False):
        return

    @functools.wraps(own)
    def nbytes(spec: Any) -> int:
        return hint(own(spec))

    nbytes._as_traced = True  # type: ignore[attr-defined]
    costs.spec_to_bytes = nbytes


def new_row_count() -> torch.SymInt:
    """A new symbol for a number of rows that is data, in a fake implementation of an operator."""
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    count = torch.library.get_ctx()._shape_env.create_unbacked_symint()
    _constrain_range_for_size(count)
    return count


def bind_again(node: fx.Node, result: Any) -> None:
    """Give the symbols of data in ``result``, of a call that Dynamo traced as ``node``, the names that they have there:
    what was asserted of those holds of these. Those that a fake tensor remembered have them."""
    from torch._guards import detect_fake_mode
    from torch.fx.experimental.symbolic_shapes import rebind_unbacked, resolve_unbacked_bindings

    if (mode := detect_fake_mode(pytree.tree_leaves(result))) is None:  # numbers alone, and nobody traces
        return
    bindings = resolve_unbacked_bindings(mode.shape_env, node.meta["unbacked_bindings"])
    if not any(symbol == size_expression(pytree.key_get(result, path)) for symbol, path in bindings.items()):
        rebind_unbacked(mode.shape_env, node, result)
