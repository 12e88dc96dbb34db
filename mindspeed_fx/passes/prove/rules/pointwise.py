"""Operators that compute an element from elements at the same place."""

from __future__ import annotations

import math
from typing import Any

import torch

from mindspeed_fx.passes.prove import functions as fn
from mindspeed_fx.passes.prove.conditions import (
    at_least_zero,
    choose,
    either,
    is_positive,
    is_zero,
    is_zero_real,
    negate,
)
from mindspeed_fx.passes.prove.integers import floor_div, remainder
from mindspeed_fx.passes.prove.rules.base import rule
from mindspeed_fx.passes.prove.terms import Poly, add, const, imaginary, mul, poly, scale, sub
from mindspeed_fx.passes.prove.values import Unsupported, Value, cast, nonzero, pointwise, value_of


def gelu(p: Poly, approximate: str = "none") -> Poly:
    if approximate == "tanh":
        inner = scale(add(p, scale(fn.power(p, 3), 0.044715)), math.sqrt(2 / math.pi))
        return scale(mul(p, add(const(1), fn.tanh(inner))), 0.5)
    return scale(mul(p, add(const(1), fn.odd("erf", scale(p, 1 / math.sqrt(2))))), 0.5)


def softplus(p: Poly, beta: float = 1.0) -> Poly:
    return scale(fn.logarithm(add(const(1), fn.exponential(scale(p, beta)))), 1 / beta)


def relu(p: Poly) -> Poly:
    return fn.maximum(p, const(0))


def reciprocal(p: Poly) -> Poly:
    return fn.power(p, -1)


UNARY = {
    "neg": lambda p: scale(p, -1),
    "exp": fn.exponential,
    "log": fn.logarithm,
    "log1p": lambda p: fn.logarithm(add(const(1), p)),
    "expm1": lambda p: sub(fn.exponential(p), const(1)),
    "exp2": lambda p: fn.exponential(scale(p, math.log(2))),
    "log2": lambda p: scale(fn.logarithm(p), 1 / math.log(2)),
    "sqrt": lambda p: fn.power(p, 0.5),
    "rsqrt": lambda p: fn.power(p, -0.5),
    "square": lambda p: fn.power(p, 2),
    "reciprocal": reciprocal,
    "sigmoid": fn.sigmoid,
    "tanh": fn.tanh,
    "silu": lambda p: mul(p, fn.sigmoid(p)),
    "relu": relu,
    "sin": fn.sine,
    "cos": fn.cosine,
    "abs": fn.absolute,
    "erf": lambda p: fn.odd("erf", p),
    "sign": lambda p: sub(is_positive(p), is_positive(scale(p, -1))),
    "isnan": lambda p: const(0),
    "isinf": lambda p: const(0),
    "nan_to_num": lambda p: p,
    "clone": lambda p: p,
    "contiguous": lambda p: p,
    "alias": lambda p: p,
    "lift_fresh_copy": lambda p: p,
    "lift_fresh": lambda p: p,
    "positive": lambda p: p,
}
"""Functions of one element; over the real numbers nothing is infinite or no number."""


def _unary(name: str, f: Any) -> None:
    @rule(name)
    def apply_unary(out: Any, x: Any, *_: Any, **__: Any) -> Value:
        return pointwise(out, f, x)


for _name, _f in UNARY.items():
    _unary(_name, _f)


@rule("detach")
def detach(out: Any, x: Value) -> Value:
    return pointwise(out, lambda p: fn.apply("detached", p) if p.constant is None else p, x) if x.kind == "real" else x


@rule("gelu")
def _gelu(out: Any, x: Value, approximate: str = "none") -> Value:
    return pointwise(out, lambda p: gelu(p, approximate), x)


@rule("softplus")
def _softplus(out: Any, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    return pointwise(out, lambda p: softplus(p, beta), x)


@rule("add")
def _add(out: Any, x: Any, y: Any, alpha: Any = 1) -> Value:
    return cast(pointwise(out, lambda p, q: add(p, scale(q, alpha)), x, y), out.dtype)


@rule("sub", "subtract")
def _sub(out: Any, x: Any, y: Any, alpha: Any = 1) -> Value:
    return pointwise(out, lambda p, q: sub(p, scale(q, alpha)), x, y)


@rule("rsub")
def _rsub(out: Any, x: Any, y: Any, alpha: Any = 1) -> Value:
    return pointwise(out, lambda p, q: sub(q, scale(p, alpha)), x, y)


@rule("mul", "multiply")
def _mul(out: Any, x: Any, y: Any) -> Value:
    return pointwise(out, mul, x, y)


@rule("addcmul")
def _addcmul(out: Any, x: Any, y: Any, z: Any, value: Any = 1) -> Value:
    return pointwise(out, lambda p, q, r: add(p, scale(mul(q, r), value)), x, y, z)


@rule("addcdiv")
def _addcdiv(out: Any, x: Any, y: Any, z: Any, value: Any = 1) -> Value:
    return pointwise(out, lambda p, q, r: add(p, scale(mul(q, reciprocal(r)), value)), x, y, z)


def _divided(out: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return pointwise(out, lambda p, q: mul(p, reciprocal(q)), x, y)
    if rounding_mode == "floor" and isinstance(y, int) and y > 0 and value_of(x).kind == "integer":
        return pointwise(out, lambda p: floor_div(p, y), x)
    if rounding_mode == "floor" and value_of(x).kind == "integer" and value_of(y).kind == "integer":
        return pointwise(out, lambda p, q: fn.apply("quotient", p, q), x, y)
    name = {"floor": "floored", "trunc": "truncated"}[rounding_mode]
    return pointwise(out, lambda p, q: fn.apply(name, mul(p, reciprocal(q))), x, y)


@rule("div", "divide", "true_divide")
def _div(out: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    return _divided(out, x, y, rounding_mode)


@rule("floor_divide")
def _floor_divide(out: Any, x: Any, y: Any) -> Value:
    return _divided(out, x, y, "floor")


@rule("remainder")
def _remainder(out: Any, x: Any, y: Any) -> Value:
    if isinstance(y, int) and y > 0 and value_of(x).kind == "integer":
        return pointwise(out, lambda p: remainder(p, y), x)
    return pointwise(out, lambda p, q: fn.apply("remainder", p, q), x, y)


@rule("floor", "ceil", "trunc", "round")
def _rounded(*_: Any, **__: Any) -> Value:
    raise Unsupported("rounding to whole numbers")


@rule("pow")
def _pow(out: Any, x: Any, y: Any) -> Value:
    if isinstance(y, (int, float)) and not isinstance(y, bool):
        return pointwise(out, lambda p: fn.power(p, y), x)
    if isinstance(x, (int, float)) and x > 0:
        return pointwise(out, lambda q: fn.exponential(scale(q, math.log(x))), y)
    raise Unsupported("a power of a tensor to a tensor")


@rule("maximum", "fmax")
def _maximum(out: Any, x: Any, y: Any) -> Value:
    return pointwise(out, fn.maximum, x, y)


@rule("minimum", "fmin")
def _minimum(out: Any, x: Any, y: Any) -> Value:
    return pointwise(out, fn.minimum, x, y)


@rule("clamp", "clip")
def _clamp(out: Any, x: Value, min: Any = None, max: Any = None) -> Value:
    result = pointwise(out, fn.maximum, x, min) if min is not None else x
    return pointwise(out, fn.minimum, result, max) if max is not None else result


@rule("clamp_min")
def _clamp_min(out: Any, x: Value, min: Any) -> Value:
    return pointwise(out, fn.maximum, x, min)


@rule("clamp_max")
def _clamp_max(out: Any, x: Value, max: Any) -> Value:
    return pointwise(out, fn.minimum, x, max)


@rule("logaddexp")
def _logaddexp(out: Any, x: Any, y: Any) -> Value:
    return pointwise(out, lambda p, q: fn.logarithm(add(fn.exponential(p), fn.exponential(q))), x, y)


# ---------------------------------------------------------------- conditions


def _is_whole(*args: Any) -> bool:
    return all(value_of(a).kind != "real" for a in args)


def _compare(out: Any, x: Any, y: Any, whole: Any, real: Any) -> Value:
    return pointwise(out, lambda p, q: (whole if _is_whole(x, y) else real)(sub(p, q)), x, y)


@rule("ge")
def _ge(out: Any, x: Any, y: Any) -> Value:
    return _compare(out, x, y, at_least_zero, lambda d: negate(is_positive(scale(d, -1))))


@rule("gt")
def _gt(out: Any, x: Any, y: Any) -> Value:
    return _compare(out, x, y, lambda d: at_least_zero(sub(d, const(1))), is_positive)


@rule("le")
def _le(out: Any, x: Any, y: Any) -> Value:
    return _compare(out, x, y, lambda d: at_least_zero(scale(d, -1)), lambda d: negate(is_positive(d)))


@rule("lt")
def _lt(out: Any, x: Any, y: Any) -> Value:
    return _compare(
        out, x, y, lambda d: at_least_zero(sub(scale(d, -1), const(1))), lambda d: is_positive(scale(d, -1))
    )


@rule("eq")
def _eq(out: Any, x: Any, y: Any) -> Value:
    if value_of(x).kind == value_of(y).kind == "bool":
        return pointwise(out, lambda p, q: add(const(1), scale(p, -1), scale(q, -1), scale(mul(p, q), 2)), x, y)
    return _compare(out, x, y, is_zero, is_zero_real)


@rule("ne")
def _ne(out: Any, x: Any, y: Any) -> Value:
    equal = _eq(out, x, y)
    return pointwise(out, negate, equal)


@rule("logical_not")
def _not(out: Any, x: Value) -> Value:
    return pointwise(out, negate, nonzero(x))


@rule("bitwise_not")
def _bitwise_not(out: Any, x: Value) -> Value:
    return pointwise(out, negate if x.kind == "bool" else lambda p: sub(scale(p, -1), const(1)), x)


def _conditions(*args: Any) -> list[Value]:
    return [nonzero(value_of(a)) for a in args]


def _bits(out: Any) -> None:
    if out.dtype != torch.bool:
        raise Unsupported("bits of integers")


@rule("logical_and", "bitwise_and", "__and__")
def _and(out: Any, x: Any, y: Any) -> Value:
    _bits(out)
    return pointwise(out, mul, *_conditions(x, y))


@rule("logical_or", "bitwise_or", "__or__")
def _or(out: Any, x: Any, y: Any) -> Value:
    _bits(out)
    return pointwise(out, either, *_conditions(x, y))


@rule("logical_xor", "bitwise_xor", "__xor__")
def _xor(out: Any, x: Any, y: Any) -> Value:
    _bits(out)
    return pointwise(out, lambda p, q: sub(add(p, q), scale(mul(p, q), 2)), *_conditions(x, y))


@rule("where")
def _where(out: Any, condition: Value, x: Any, y: Any) -> Value:
    return pointwise(out, choose, nonzero(condition), x, y)


@rule("masked_fill")
def _masked_fill(out: Any, x: Value, mask: Value, value: Any) -> Value:
    return pointwise(out, choose, mask, value, x)


# ---------------------------------------------------------------- types


@rule("to", "_to_copy", "type_as", "float", "double", "half", "bfloat16", "int", "long", "_conj_physical")
def _to(out: Any, x: Value, *_: Any, **__: Any) -> Value:
    return cast(x, out.dtype)


@rule("complex")
def _complex(out: Any, x: Value, y: Value) -> Value:
    return pointwise(out, lambda p, q: add(p, mul(imaginary(), q)), x, y)


@rule("polar")
def _polar(out: Any, x: Value, angle: Value) -> Value:
    return pointwise(out, lambda p, q: mul(p, add(fn.cosine(q), mul(imaginary(), fn.sine(q)))), x, angle)


def real_part(p: Poly) -> Poly:
    return poly({m: c for m, c in p.terms.items() if not _turned(m)})


def imaginary_part(p: Poly) -> Poly:
    return poly({tuple(f for f in m if f[0].kind != "imaginary"): c for m, c in p.terms.items() if _turned(m)})


def _turned(m: Any) -> bool:
    return any(a.kind == "imaginary" for a, _ in m)


@rule("conj", "_conj", "resolve_conj")
def _conjugate(out: Any, x: Value) -> Value:
    return pointwise(out, lambda p: sub(real_part(p), mul(imaginary(), imaginary_part(p))), x)


@rule("view_as_real")
def _view_as_real(out: Any, x: Value) -> Value:
    def element(i: Any) -> Poly:
        p = x.at(i[:-1])
        return choose(at_least_zero(sub(i[-1], const(1))), imaginary_part(p), real_part(p))

    return Value(out.shape, out.dtype, element)


@rule("view_as_complex")
def _view_as_complex(out: Any, x: Value) -> Value:
    return Value(out.shape, out.dtype, lambda i: add(x.at((*i, const(0))), mul(imaginary(), x.at((*i, const(1))))))


@rule("dropout")
def _dropout(out: Any, x: Value, p: float, train: bool) -> Value:
    if train and p:
        raise Unsupported("random numbers")
    return x
