"""What mixtures of experts are made of: sorted tokens, the way back, counts, products per expert."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from mindspeed_fx.passes.prove.conditions import at_least_zero, negate
from mindspeed_fx.passes.prove.rules.base import RULES, rule
from mindspeed_fx.passes.prove.rules.views import with_index
from mindspeed_fx.passes.prove.sums import index, substitute, sum_of, whole
from mindspeed_fx.passes.prove.terms import Atom, Poly, const, mul, sub
from mindspeed_fx.passes.prove.values import Indices, Unsupported, Value, dimension


def _atom(p: Poly) -> Atom | None:
    """The atom that ``p`` is; None where it is something else."""
    if len(p.terms) != 1:
        return None
    ((mono, c),) = p.terms.items()
    return mono[0][0] if c == 1 and len(mono) == 1 and mono[0][1] == 1 else None


def _is_whole(a: Atom | None, name: str) -> bool:
    return a is not None and a.kind == "whole" and a.data[0].startswith(name)


def _order(x: Value, dim: int, descending: bool) -> Callable[[Indices], Poly]:
    """The places of ``x`` in order; of the inverse of an order it is the place itself."""

    def element(i: Indices) -> Poly:
        def plain(at: Indices) -> Poly:
            return whole(f"order {dim} {descending}", [(x.shape, x.at)], at)

        inverse = _atom(i[0]) if len(i) == 1 else None
        if _is_whole(inverse, "inverse"):
            permutation, place = inverse.data[1][0], inverse.data[2]  # type: ignore[union-attr]
            closed = _atom(permutation)
            if closed is not None and closed.kind == "lambda":
                z = index(x.shape[0])
                if substitute(closed.data[1], {closed.data[0][0]: z}) is plain((z,)):
                    return place
        return plain(i)

    return element


@rule("sort", "msort")
def _sort(outs: Sequence[Any], x: Value, *args: Any, **kwargs: Any) -> tuple[Value, Value]:
    """A sort that promises no order of equal elements is read as the stable one."""
    dim = dimension(kwargs.get("dim", args[0] if args else -1), len(x.shape))
    order = _order(x, dim, kwargs.get("descending", args[1] if len(args) > 1 else False))
    values = Value(outs[0].shape, outs[0].dtype, lambda i: x.at(with_index(i, dim, order(i))))
    return values, Value(outs[1].shape, outs[1].dtype, order)


@rule("argsort")
def _argsort(out: Any, x: Value, *args: Any, **kwargs: Any) -> Value:
    return _sort([out, out], x, *args, **kwargs)[1]


def _inverse(out: Any, places: Value, src: Any) -> Value:
    """Numbers in order, written to the places of a permutation: its inverse."""
    z = index(places.shape[0]) if len(places.shape) == 1 else const(0)
    if not z.terms or not isinstance(src, Value) or src.shape != places.shape or tuple(out.shape) != places.shape:
        raise Unsupported("a scatter")
    if src.at((z,)) is not z or not _is_whole(_atom(places.at((z,))), "order"):
        raise Unsupported("a scatter of something else than places in order")
    return Value(out.shape, out.dtype, lambda i: whole("inverse", [(places.shape, places.at)], i))


@rule("index_put")
def _index_put(out: Any, x: Value, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Value:
    if accumulate or len(indices) != 1 or not isinstance(indices[0], Value):
        raise Unsupported("an index_put")
    return _inverse(out, indices[0], values)


@rule("scatter")
def _scatter(out: Any, x: Value, dim: int, places: Value, src: Any, *_: Any, **__: Any) -> Value:
    return _inverse(out, places, src)


@rule("histc")
def _histc(out: Any, x: Value, bins: int = 100, low: Any = 0, high: Any = 0) -> Value:
    """How many elements each bin has; which bin an element is in depends on that element alone."""
    if low == high:
        raise Unsupported("a histogram between the least and the largest element")

    def element(i: Indices) -> Poly:
        def counted(at: Indices) -> Poly:
            if len(at) < len(x.shape):
                return sum_of(x.shape[len(at)], lambda j: counted((*at, j)))
            return whole(f"bin {bins} {low} {high}", [], (x.at(at), i[0]))

        return counted(())

    return Value(out.shape, out.dtype, element)


def _grouped_product(out: Any, x: Value, weight: Value, offsets: Value | None = None, *_: Any, **__: Any) -> Value:
    """Row i times the matrix of the group whose rows end after it, and those of the group before do not; rows after
    the last group are zero."""
    if offsets is None or len(x.shape) != 2 or len(weight.shape) != 3:
        raise Unsupported("a grouped product of other shapes")

    def is_before(row: Poly, group: Poly) -> Poly:
        return at_least_zero(sub(sub(offsets.at((group,)), row), const(1)))

    def element(i: Indices) -> Poly:
        def term(g: Poly) -> Poly:
            earlier = mul(at_least_zero(sub(g, const(1))), is_before(i[0], sub(g, const(1))))
            product = sum_of(x.shape[1], lambda k: mul(x.at((i[0], k)), weight.at((g, k, i[1]))))
            return mul(mul(is_before(i[0], g), negate(earlier)), product)

        return sum_of(weight.shape[0], term)

    return Value(out.shape, out.dtype, element)


for _name in ("mindspeed.grouped_matmul", "transformers.grouped_mm_fallback", "aten._grouped_mm"):
    RULES[_name] = _grouped_product
