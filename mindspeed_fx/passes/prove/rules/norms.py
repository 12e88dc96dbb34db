"""Norms that are one operator of ATen."""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

from mindspeed_fx.passes.prove import functions as fn
from mindspeed_fx.passes.prove.integers import floor_div, remainder
from mindspeed_fx.passes.prove.rules.base import rule
from mindspeed_fx.passes.prove.rules.views import with_index
from mindspeed_fx.passes.prove.sums import sum_of
from mindspeed_fx.passes.prove.terms import Poly, add, const, mul, scale, sub
from mindspeed_fx.passes.prove.values import Indices, Value


def _standardized(x: Value, dims: Sequence[int], eps: float) -> tuple[Value, Value, Value]:
    """(x - mean) / sqrt(variance + eps), the mean and the inverse root, over ``dims``."""
    n = math.prod(x.shape[d] for d in dims)

    def statistics(i: Indices) -> tuple[Poly, Poly]:
        def total(f: Callable[[Poly], Poly]) -> Poly:
            def inner(remaining: Sequence[int], current: Indices) -> Poly:
                if not remaining:
                    return f(x.at(current))
                d = remaining[0]
                return sum_of(x.shape[d], lambda j: inner(remaining[1:], with_index(current, d, j)))

            return inner(dims, i)

        mean = scale(total(lambda p: p), 1 / n)
        variance = sub(scale(total(lambda p: fn.power(p, 2)), 1 / n), fn.power(mean, 2))
        return mean, fn.power(add(variance, const(eps)), -0.5)

    mean = Value(x.shape, x.dtype, lambda i: statistics(i)[0])
    root = Value(x.shape, x.dtype, lambda i: statistics(i)[1])
    return Value(x.shape, x.dtype, lambda i: mul(sub(x.at(i), mean.at(i)), root.at(i))), mean, root


def _scaled(x: Value, weight: Value | None, bias: Value | None, places: Callable[[Indices], Indices]) -> Callable:
    def element(i: Indices) -> Poly:
        p = x.at(i) if weight is None else mul(x.at(i), weight.at(places(i)))
        return p if bias is None else add(p, bias.at(places(i)))

    return element


@rule("native_layer_norm")
def _native_layer_norm(
    outs: Any, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    rank = len(x.shape)
    dims = range(rank - len(shape), rank)
    normal, mean, root = _standardized(x, dims, eps)
    y = Value(outs[0].shape, outs[0].dtype, _scaled(normal, weight, bias, lambda i: i[rank - len(shape) :]))
    return y, *(Value(out.shape, out.dtype, v.at) for v, out in ((mean, outs[1]), (root, outs[2])))


@rule("layer_norm")
def _layer_norm(
    out: Any,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    return _native_layer_norm([out, out, out], x, shape, weight, bias, eps)[0]


@rule("group_norm")
def _group_norm(
    out: Any,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Value:
    apart = (x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    parts = Value(apart, x.dtype, lambda i: x.at((i[0], add(scale(i[1], apart[2]), i[2]), *i[3:])))
    normal = _standardized(parts, range(2, len(apart)), eps)[0]
    whole = Value(
        x.shape,
        x.dtype,
        lambda i: normal.at((i[0], floor_div(i[1], apart[2]), remainder(i[1], apart[2]), *i[2:])),
    )
    return Value(out.shape, out.dtype, _scaled(whole, weight, bias, lambda i: i[1:2]))
