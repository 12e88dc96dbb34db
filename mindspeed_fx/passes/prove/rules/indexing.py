"""Operators that read or write elements at places that are values, and operators that make tensors of numbers."""

from __future__ import annotations

from typing import Any, Sequence

from mindspeed_fx.passes.prove.conditions import is_zero
from mindspeed_fx.passes.prove.rules.base import rule
from mindspeed_fx.passes.prove.rules.views import with_index
from mindspeed_fx.passes.prove.sums import sum_of
from mindspeed_fx.passes.prove.terms import Poly, add, const, mul, scale, sub
from mindspeed_fx.passes.prove.values import Indices, Unsupported, Value, broadcast, dimension, scalar, value_of


@rule("embedding")
def _embedding(out: Any, weight: Value, ids: Value, *_: Any, **__: Any) -> Value:
    return Value(out.shape, out.dtype, lambda i: weight.at((ids.at(i[:-1]), i[-1])))


@rule("index_select")
def _index_select(out: Any, x: Value, dim: int, index: Value) -> Value:
    dim = dimension(dim, len(x.shape))
    return Value(out.shape, out.dtype, lambda i: x.at(with_index(i, dim, index.at(i[dim : dim + 1]))))


@rule("gather")
def _gather(out: Any, x: Value, dim: int, index: Value, **_: Any) -> Value:
    dim = dimension(dim, len(x.shape))
    return Value(out.shape, out.dtype, lambda i: x.at(with_index(i, dim, index.at(i)))) if x.shape else x


@rule("index")
def _index(out: Any, x: Value, indices: Sequence[Value | None]) -> Value:
    indices = [*indices, *[None] * (len(x.shape) - len(indices))]
    if any(v is not None and v.kind == "bool" for v in indices):
        raise Unsupported("rows that a mask selects, whose number is data")
    where = [d for d, v in enumerate(indices) if v is not None]
    rank = max(len(indices[d].shape) for d in where)  # type: ignore[union-attr]
    first = where[0] if where == list(range(where[0], where[-1] + 1)) else 0

    def element(i: Indices) -> Poly:
        picked, rest = i[first : first + rank], iter((*i[:first], *i[first + rank :]))
        places = []
        for v in indices:
            places.append(next(rest) if v is None else v.at(broadcast(picked, v.shape)))
        return x.at(tuple(places))

    return Value(out.shape, out.dtype, element)


@rule("scatter_add", "index_add")
def _scatter_add(out: Any, x: Value, dim: int, index: Value, src: Value, alpha: Any = 1) -> Value:
    dim = dimension(dim, len(x.shape))
    by_row = len(index.shape) == 1 and len(x.shape) > 1 or index.shape != src.shape

    def element(i: Indices) -> Poly:
        def term(j: Poly) -> Poly:
            place = index.at((j,) if by_row else with_index(i, dim, j))
            return mul(is_zero(sub(i[dim], place)), src.at(with_index(i, dim, j)))

        return add(x.at(i), scale(sum_of(src.shape[dim], term), alpha))

    if not by_row and any(a != b for d, (a, b) in enumerate(zip(index.shape, x.shape)) if d != dim):
        raise Unsupported("a scatter into a part")
    return Value(out.shape, out.dtype, element)


@rule("one_hot")
def _one_hot(out: Any, x: Value, *_: Any) -> Value:
    return Value(out.shape, out.dtype, lambda i: is_zero(sub(i[-1], x.at(i[:-1]))))


def _filled(out: Any, c: Any) -> Value:
    p = scalar(c)
    return Value(out.shape, out.dtype, lambda _: p)


@rule("zeros", "zeros_like", "new_zeros")
def _zeros(out: Any, *_: Any, **__: Any) -> Value:
    return _filled(out, 0)


@rule("ones", "ones_like", "new_ones")
def _ones(out: Any, *_: Any, **__: Any) -> Value:
    return _filled(out, 1)


@rule("full", "full_like", "new_full")
def _full(out: Any, _: Any, c: Any, **__: Any) -> Value:
    if isinstance(c, Value):
        return Value(out.shape, out.dtype, lambda _: c.at(()))
    return _filled(out, c)


@rule("scalar_tensor")
def _scalar_tensor(out: Any, c: Any, **_: Any) -> Value:
    return _filled(out, c)


@rule("fill")
def _fill(out: Any, _: Any, c: Any) -> Value:
    v = value_of(c)
    return Value(out.shape, out.dtype, lambda _: v.at(()))


@rule("eye")
def _eye(out: Any, *_: Any, **__: Any) -> Value:
    return Value(out.shape, out.dtype, lambda i: is_zero(sub(i[0], i[1])))


@rule("arange")
def _arange(out: Any, *args: Any, **_: Any) -> Value:
    start, step = (args[0] if len(args) > 1 else 0), (args[2] if len(args) > 2 else 1)
    return Value(out.shape, out.dtype, lambda i: add(const(start), scale(i[0], step)))
