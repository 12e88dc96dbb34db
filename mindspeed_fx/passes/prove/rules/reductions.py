"""Operators that compute an element from many: sums, means, largest ones, softmax, products of matrices."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch

from mindspeed_fx.passes.prove import functions as fn
from mindspeed_fx.passes.prove.conditions import at_least_zero, negate
from mindspeed_fx.passes.prove.rules.base import rule
from mindspeed_fx.passes.prove.rules.views import with_index
from mindspeed_fx.passes.prove.sums import reduced, sum_of
from mindspeed_fx.passes.prove.terms import Poly, const, mul, scale, sub
from mindspeed_fx.passes.prove.values import Indices, Unsupported, Value, dimension, nonzero


def _dims(x: Value, dims: Any) -> list[int]:
    if dims is None or dims == []:
        return list(range(len(x.shape)))
    return [dimension(d, len(x.shape)) for d in ([dims] if isinstance(dims, int) else dims)]


def _over(out: Any, x: Value, dims: list[int], keepdim: bool, reduce: Callable, element: Callable) -> Value:
    """``reduce(size, element at an index)`` over each of ``dims`` in turn."""

    def at(i: Indices) -> Poly:
        outer = iter(i)
        places: list[Any] = []
        for d in range(len(x.shape)):
            if d not in dims:
                places.append(next(outer))
            else:
                places.append(None)
                if keepdim:
                    next(outer)

        def inner(remaining: list[int], current: list[Any]) -> Poly:
            if not remaining:
                return element(tuple(current))
            d = remaining[0]
            return reduce(x.shape[d], lambda j: inner(remaining[1:], [*current[:d], j, *current[d + 1 :]]))

        return inner(dims, places)

    return Value(out.shape, out.dtype, at)


def _count(x: Value, dims: list[int]) -> int:
    n = 1
    for d in dims:
        n *= x.shape[d]
    return n


@rule("sum")
def _sum(out: Any, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return _over(out, x, _dims(x, dim), keepdim, sum_of, x.at)


@rule("mean")
def _mean(out: Any, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    dims = _dims(x, dim)
    total = _over(out, x, dims, keepdim, sum_of, x.at)
    return Value(out.shape, out.dtype, lambda i: scale(total.at(i), 1 / _count(x, dims)))


def _variance(out: Any, x: Value, dim: Any, correction: Any, keepdim: bool) -> Value:
    dims = _dims(x, dim)
    n = _count(x, dims)
    total = _over(out, x, dims, keepdim, sum_of, x.at)
    squares = _over(out, x, dims, keepdim, sum_of, lambda i: fn.power(x.at(i), 2))

    def element(i: Indices) -> Poly:
        return scale(sub(squares.at(i), scale(fn.power(total.at(i), 2), 1 / n)), 1 / (n - correction))

    return Value(out.shape, out.dtype, element)


def _correction(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """(dims, correction, keepdim) of any overload of var and std."""
    dim = kwargs.get("dim", None)
    keepdim = kwargs.get("keepdim", False)
    unbiased = kwargs.get("unbiased", True)
    args = list(args)
    if args and isinstance(args[0], bool):
        unbiased = args.pop(0)
    elif args:
        dim = args.pop(0)
        if args:
            unbiased = args.pop(0)
        if args:
            keepdim = args.pop(0)
    correction = kwargs.get("correction", int(unbiased))
    return dim, 1 if correction is None else correction, keepdim


@rule("var")
def _var(out: Any, x: Value, *args: Any, **kwargs: Any) -> Value:
    dim, correction, keepdim = _correction(args, kwargs)
    return _variance(out, x, dim, correction, keepdim)


@rule("std")
def _std(out: Any, x: Value, *args: Any, **kwargs: Any) -> Value:
    variance = _var(out, x, *args, **kwargs)
    return Value(out.shape, out.dtype, lambda i: fn.power(variance.at(i), 0.5))


@rule("var_mean")
def _var_mean(outs: Any, x: Value, *args: Any, **kwargs: Any) -> tuple[Value, Value]:
    dim, correction, keepdim = _correction(args, kwargs)
    return _variance(outs[0], x, dim, correction, keepdim), _mean(outs[1], x, dim, keepdim)


def _extreme(kind: str) -> Callable:
    return lambda size, element: reduced(kind, size, element)


@rule("amax")
def _amax(out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _over(out, x, _dims(x, dim), keepdim, _extreme("amax"), x.at)


@rule("amin")
def _amin(out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return _over(out, x, _dims(x, dim), keepdim, _extreme("amin"), x.at)


@rule("max")
def _max(out: Any, x: Value, *args: Any, **kwargs: Any) -> Any:
    if isinstance(out, torch.Tensor) and not args:
        return _amax(out, x)
    if isinstance(out, torch.Tensor):
        from mindspeed_fx.passes.prove.values import pointwise

        return pointwise(out, fn.maximum, x, *args)
    raise Unsupported("the place of the largest element")


@rule("prod")
def _prod(out: Any, x: Value, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    return _over(out, x, _dims(x, dim), keepdim, _extreme("prod"), x.at)


@rule("any")
def _any(out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    c = nonzero(x)
    count = _over(out, c, _dims(x, dim), keepdim, sum_of, c.at)
    return Value(out.shape, out.dtype, lambda i: at_least_zero(sub(count.at(i), const(1))))


@rule("all")
def _all(out: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    c = nonzero(x)
    count = _over(out, c, _dims(x, dim), keepdim, sum_of, lambda i: negate(c.at(i)))
    return Value(out.shape, out.dtype, lambda i: negate(at_least_zero(sub(count.at(i), const(1)))))


@rule("cumsum")
def _cumsum(out: Any, x: Value, dim: int, **_: Any) -> Value:
    dim = dimension(dim, len(x.shape))

    def element(i: Indices) -> Poly:
        return sum_of(x.shape[dim], lambda j: mul(at_least_zero(sub(i[dim], j)), x.at(with_index(i, dim, j))))

    return Value(out.shape, out.dtype, element) if x.shape else x


@rule("linalg_vector_norm", "norm")
def _norm(out: Any, x: Value, p: Any = 2, dim: Any = None, keepdim: bool = False, **_: Any) -> Value:
    if p != 2:
        raise Unsupported(f"a norm of order {p}")
    squares = _over(out, x, _dims(x, dim), keepdim, sum_of, lambda i: fn.power(x.at(i), 2))
    return Value(out.shape, out.dtype, lambda i: fn.power(squares.at(i), 0.5))


# ---------------------------------------------------------------- softmax


def _sum_of_exponentials(x: Value, dim: int, i: Indices) -> Poly:
    return sum_of(x.shape[dim], lambda j: fn.exponential(x.at(with_index(i, dim, j))))


@rule("logsumexp")
def _logsumexp(out: Any, x: Value, dim: Any, keepdim: bool = False) -> Value:
    total = _over(out, x, _dims(x, dim), keepdim, sum_of, lambda i: fn.exponential(x.at(i)))
    return Value(out.shape, out.dtype, lambda i: fn.logarithm(total.at(i)))


@rule("softmax", "_softmax", "_safe_softmax")
def _softmax(out: Any, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    dim = dimension(dim, len(x.shape))

    def element(i: Indices) -> Poly:
        return mul(fn.exponential(x.at(i)), fn.power(_sum_of_exponentials(x, dim, i), -1))

    return Value(out.shape, out.dtype, element)


@rule("log_softmax", "_log_softmax")
def _log_softmax(out: Any, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    dim = dimension(dim, len(x.shape))
    return Value(out.shape, out.dtype, lambda i: sub(x.at(i), fn.logarithm(_sum_of_exponentials(x, dim, i))))
