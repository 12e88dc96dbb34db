"""Products of matrices, attention and convolutions."""

from __future__ import annotations

from typing import Any, Sequence

from mindspeed_fx.passes.prove import functions as fn
from mindspeed_fx.passes.prove.conditions import at_least_zero, choose
from mindspeed_fx.passes.prove.integers import floor_div
from mindspeed_fx.passes.prove.rules.base import rule
from mindspeed_fx.passes.prove.sums import sum_of
from mindspeed_fx.passes.prove.terms import Poly, add, const, infinity, mul, sub
from mindspeed_fx.passes.prove.terms import scale as scaled
from mindspeed_fx.passes.prove.values import Indices, Unsupported, Value, at_broadcast

MOST_TAPS = 8
"""Of a convolution, in one dimension, that is written out tap by tap."""


@rule("matmul", "mm", "bmm")
def matmul(out: Any, x: Value, y: Value) -> Value:
    n = x.shape[-1]

    def element(i: Indices) -> Poly:
        rows = i[-1:] if len(x.shape) == 1 else ()
        if len(y.shape) == 1:
            batch, row, column = i[: len(x.shape) - 2], i[len(x.shape) - 2 : len(x.shape) - 1], ()
        elif len(x.shape) == 1:
            batch, row, column = i[:-1], (), rows
        else:
            batch, row, column = i[:-2], i[-2:-1], i[-1:]

        def term(j: Poly) -> Poly:
            left, right = _trimmed(x, batch), _trimmed(y, batch)
            return mul(x.at((*left, *row, j)), y.at((*right, j, *column)))

        return sum_of(n, term)

    return Value(out.shape, out.dtype, element)


def _trimmed(x: Value, batch: Indices) -> Indices:
    """The batch indices that ``x`` has of a broadcast product's."""
    rank = max(len(x.shape) - 2, 0)
    return batch[len(batch) - rank :] if rank else ()


@rule("mv", "dot")
def _mv(out: Any, x: Value, y: Value) -> Value:
    return matmul(out, x, y)


@rule("linear")
def _linear(out: Any, x: Value, weight: Value, bias: Value | None = None) -> Value:
    def element(i: Indices) -> Poly:
        total = sum_of(x.shape[-1], lambda j: mul(x.at((*i[:-1], j)), weight.at((*i[-1:], j))))
        return add(total, bias.at(i[-1:])) if bias is not None else total

    if len(weight.shape) != 2:
        raise Unsupported("a linear of one weight row")
    return Value(out.shape, out.dtype, element)


@rule("addmm", "baddbmm")
def _addmm(out: Any, bias: Value, x: Value, y: Value, beta: Any = 1, alpha: Any = 1) -> Value:
    total = matmul(out, x, y)
    return Value(out.shape, out.dtype, lambda i: add(scaled(at_broadcast(bias, i), beta), scaled(total.at(i), alpha)))


@rule("scaled_dot_product_attention")
def _attention(
    out: Any,
    q: Value,
    k: Value,
    v: Value,
    attn_mask: Value | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,  # noqa: A002  torch's name
    enable_gqa: bool = False,
) -> Value:

    if dropout_p:
        raise Unsupported("random numbers")
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[-3] // k.shape[-3] if len(q.shape) > 3 and enable_gqa else 1

    def key(i: Indices, j: Poly, d: Poly, x: Value) -> Poly:
        places = (*i, j, d) if groups == 1 else (*i[:-1], floor_div(i[-1], groups), j, d)
        return x.at(places[len(places) - len(x.shape) :])

    def weight(i: Indices, row: Poly, j: Poly) -> Poly:
        score = scaled(sum_of(q.shape[-1], lambda d: mul(q.at((*i, row, d)), key(i, j, d, k))), factor)
        blocked = scaled(infinity(), -1)
        if is_causal:
            score = choose(at_least_zero(sub(row, j)), score, blocked)
        if attn_mask is not None:
            here = at_broadcast(attn_mask, (*i, row, j))
            score = choose(here, score, blocked) if attn_mask.kind == "bool" else add(score, here)
        return fn.exponential(score)

    def element(i: Indices) -> Poly:
        outer, row, column = i[:-2], i[-2], i[-1]
        n = k.shape[-2]
        total = sum_of(n, lambda j: mul(weight(outer, row, j), key(outer, j, column, v)))
        return mul(total, fn.power(sum_of(n, lambda j: weight(outer, row, j)), -1))

    return Value(out.shape, out.dtype, element)


@rule("convolution")
def _convolution(
    out: Any,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:

    if transposed:
        raise Unsupported("a transposed convolution")
    per_group, spatial = weight.shape[1], weight.shape[2:]
    outputs = weight.shape[0] // groups

    def element(i: Indices) -> Poly:
        group = floor_div(i[1], outputs)

        def over(d: int, taps: Indices, inside: Poly, places: Indices) -> Poly:
            if d == len(spatial):
                return mul(
                    inside,
                    sum_of(
                        per_group,
                        lambda c: mul(
                            x.at((i[0], add(scaled(group, per_group), c), *places)), weight.at((i[1], c, *taps))
                        ),
                    ),
                )

            def tap(t: Poly) -> Poly:
                place = add(scaled(i[2 + d], stride[d]), scaled(t, dilation[d]), const(-padding[d]))
                valid = mul(at_least_zero(place), at_least_zero(sub(const(x.shape[2 + d] - 1), place)))
                return over(d + 1, (*taps, t), mul(inside, valid), (*places, place))

            if spatial[d] <= MOST_TAPS:  # written out, as shifted products are: a bound then has one index, not two
                return add(*(tap(const(t)) for t in range(spatial[d])))
            return sum_of(spatial[d], tap)

        total = over(0, (), const(1), ())
        return add(total, bias.at(i[1:2])) if bias is not None else total

    return Value(out.shape, out.dtype, element)
