"""Operators that put elements in other places: views, joins, repeats."""

from __future__ import annotations

from typing import Any, Sequence

from mindspeed_fx.passes.prove.conditions import at_least_zero, choose
from mindspeed_fx.passes.prove.integers import floor_div, remainder
from mindspeed_fx.passes.prove.rules.base import rule
from mindspeed_fx.passes.prove.terms import Poly, add, const, mul, scale, sub
from mindspeed_fx.passes.prove.values import Indices, Value, broadcast, dimension, reindex, scalar


def moved(out: Any, x: Value, places: Any) -> Value:
    """``x`` read at ``places(indices)``."""
    return Value(out.shape, x.dtype, lambda i: x.at(tuple(places(i))))


def with_index(indices: Indices, dim: int, i: Poly) -> Indices:
    return (*indices[:dim], i, *indices[dim + 1 :])


@rule(
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "_reshape_alias"),
    *("view_copy", "ravel", "reshape_as", "view_as"),
)
def _view(out: Any, x: Value, *_: Any, **__: Any) -> Value:
    if x.shape and 0 in x.shape:
        return Value(out.shape, x.dtype, lambda i: const(0))
    return moved(out, x, lambda i: reindex(i, x.shape, tuple(out.shape)))


@rule("expand", "expand_as", "broadcast_to")
def _expand(out: Any, x: Value, *_: Any, **__: Any) -> Value:
    return moved(out, x, lambda i: broadcast(i, x.shape))


def _permuted(out: Any, x: Value, order: Sequence[int]) -> Value:
    return moved(out, x, lambda i: [i[list(order).index(d)] for d in range(len(order))])


@rule("permute")
def _permute(out: Any, x: Value, dims: Sequence[int]) -> Value:
    return _permuted(out, x, [dimension(d, len(x.shape)) for d in dims])


@rule("transpose", "swapaxes", "swapdims")
def _transpose(out: Any, x: Value, a: int, b: int) -> Value:
    order = list(range(len(x.shape)))
    a, b = dimension(a, len(order)), dimension(b, len(order))
    order[a], order[b] = b, a
    return _permuted(out, x, order)


@rule("t", "numpy_T")
def _t(out: Any, x: Value) -> Value:
    return _permuted(out, x, range(len(x.shape))[::-1])


@rule("mT", "adjoint")
def _matrix_t(out: Any, x: Value) -> Value:
    return _transpose(out, x, -1, -2)


@rule("movedim")
def _movedim(out: Any, x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Value:
    rank = len(x.shape)
    sources, places = ([d] if isinstance(d, int) else list(d) for d in (source, destination))
    sources, places = [dimension(d, rank) for d in sources], [dimension(d, rank) for d in places]
    rest = iter(d for d in range(rank) if d not in sources)
    return _permuted(out, x, [sources[places.index(d)] if d in places else next(rest) for d in range(rank)])


def _clipped(start: int | None, length: int) -> int:
    start = 0 if start is None else start
    return min(max(start + length if start < 0 else start, 0), length)


@rule("slice")
def _slice(out: Any, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Value:
    dim = dimension(dim, len(x.shape))
    first = _clipped(start, x.shape[dim])
    return moved(out, x, lambda i: with_index(i, dim, add(scale(i[dim], step), const(first))))


@rule("narrow")
def _narrow(out: Any, x: Value, dim: int, start: int, length: int) -> Value:
    return _slice(out, x, dim, start)


@rule("select")
def _select(out: Any, x: Value, dim: int, index: int) -> Value:
    dim = dimension(dim, len(x.shape))
    place = const(dimension(index, x.shape[dim]))
    return moved(out, x, lambda i: (*i[:dim], place, *i[dim:]))


def _split(outs: Sequence[Any], x: Value, dim: int) -> tuple[Value, ...]:
    dim = dimension(dim, len(x.shape))
    parts, start = [], 0
    for out in outs:
        parts.append(_narrow(out, x, dim, start, out.shape[dim]))
        start += out.shape[dim]
    return tuple(parts)


@rule("split", "split_with_sizes", "chunk", "tensor_split", "split_copy")
def _split_rule(outs: Any, x: Value, _: Any, dim: int = 0) -> tuple[Value, ...]:
    return _split(outs, x, dim)


@rule("unbind")
def _unbind(outs: Any, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select(out, x, dim, i) for i, out in enumerate(outs))


@rule("cat", "concat", "concatenate")
def _cat(out: Any, tensors: Sequence[Value], dim: int = 0) -> Value:
    tensors = [t for t in tensors if t.shape != (0,)]
    dim = dimension(dim, len(out.shape))

    def element(i: Indices) -> Poly:
        result, start = const(0), 0
        for n, t in enumerate(tensors):
            here = t.at(with_index(i, dim, sub(i[dim], const(start))))
            result = choose(at_least_zero(sub(i[dim], const(start))), here, result) if n else here
            start += t.shape[dim]
        return result

    return Value(out.shape, out.dtype, element)


@rule("stack")
def _stack(out: Any, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim = dimension(dim, len(out.shape))

    def element(i: Indices) -> Poly:
        inner = (*i[:dim], *i[dim + 1 :])
        result = tensors[0].at(inner)
        for n, t in enumerate(tensors[1:], 1):
            result = choose(at_least_zero(sub(i[dim], const(n))), t.at(inner), result)
        return result

    return Value(out.shape, out.dtype, element)


@rule("repeat", "tile")
def _repeat(out: Any, x: Value, *_: Any) -> Value:
    def places(i: Indices) -> Indices:
        return tuple(remainder(p, n) if n > 1 else const(0) for p, n in zip(broadcast(i, x.shape), x.shape))

    return moved(out, x, places)


@rule("repeat_interleave")
def _repeat_interleave(out: Any, x: Value, repeats: Any, dim: Any = None, **_: Any) -> Value:
    from mindspeed_fx.passes.prove.values import Unsupported

    if not isinstance(repeats, int) or dim is None:
        raise Unsupported("repeats that are a tensor")
    dim = dimension(dim, len(x.shape))
    return moved(out, x, lambda i: with_index(i, dim, floor_div(i[dim], repeats)))


@rule("flip")
def _flip(out: Any, x: Value, dims: Sequence[int]) -> Value:
    dims = [dimension(d, len(x.shape)) for d in dims]
    return moved(out, x, lambda i: [sub(const(x.shape[d] - 1), p) if d in dims else p for d, p in enumerate(i)])


@rule("roll")
def _roll(out: Any, x: Value, shifts: Any, dims: Any = ()) -> Value:
    from mindspeed_fx.passes.prove.values import Unsupported

    shifts, dims = ([v] if isinstance(v, int) else list(v) for v in (shifts, dims))
    if not dims:
        raise Unsupported("a roll of the flattened tensor")
    turns = {dimension(d, len(x.shape)): s for d, s in zip(dims, shifts)}

    def places(i: Indices) -> list[Poly]:
        return [
            remainder(add(p, const(-turns[d] % x.shape[d])), x.shape[d]) if d in turns else p for d, p in enumerate(i)
        ]

    return moved(out, x, places)


@rule("constant_pad_nd")
def _pad(out: Any, x: Value, pad: Sequence[int], value: Any = 0) -> Value:
    rank = len(x.shape)
    before = {rank - 1 - k: pad[2 * k] for k in range(len(pad) // 2)}

    def element(i: Indices) -> Poly:
        inside = const(1)
        places = list(i)
        for d, n in before.items():
            places[d] = sub(i[d], const(n))
            inside = mul(inside, at_least_zero(places[d]))
            inside = mul(inside, at_least_zero(sub(const(x.shape[d] - 1), places[d])))
        return choose(inside, x.at(tuple(places)), scalar(value))

    return Value(out.shape, out.dtype, element)


def _between(i: Poly, first: int, end: int) -> Poly:
    return mul(at_least_zero(sub(i, const(first))), at_least_zero(sub(const(end - 1), i)))


@rule("slice_scatter")
def _slice_scatter(
    out: Any, x: Value, src: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Value:
    dim = dimension(dim, len(x.shape))
    first = _clipped(start, x.shape[dim])
    last = first + (src.shape[dim] - 1) * step + 1

    def element(i: Indices) -> Poly:
        written = _between(i[dim], first, last)
        offset = sub(i[dim], const(first))
        if step != 1:
            written = mul(written, sub(const(1), at_least_zero(sub(remainder(offset, step), const(1)))))
        return choose(written, src.at(with_index(i, dim, floor_div(offset, step))), x.at(i))

    return Value(out.shape, out.dtype, element)


@rule("select_scatter")
def _select_scatter(out: Any, x: Value, src: Value, dim: int, index: int) -> Value:
    dim = dimension(dim, len(x.shape))
    place = dimension(index, x.shape[dim])
    return Value(
        out.shape,
        out.dtype,
        lambda i: choose(_between(i[dim], place, place + 1), src.at((*i[:dim], *i[dim + 1 :])), x.at(i)),
    )


@rule("copy")
def _copy(out: Any, x: Value, src: Value, *_: Any) -> Value:
    return Value(out.shape, out.dtype, lambda i: src.at(broadcast(i, src.shape)))


def _triangle(out: Any, x: Value, diagonal: int, lower: bool) -> Value:
    def element(i: Indices) -> Poly:
        distance = add(sub(i[-2], i[-1]), const(diagonal))
        kept = at_least_zero(distance if lower else scale(distance, -1))
        return mul(kept, x.at(i))

    return Value(out.shape, out.dtype, element)


@rule("tril")
def _tril(out: Any, x: Value, diagonal: int = 0) -> Value:
    return _triangle(out, x, diagonal, True)


@rule("triu")
def _triu(out: Any, x: Value, diagonal: int = 0) -> Value:
    return _triangle(out, x, diagonal, False)
