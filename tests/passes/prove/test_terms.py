"""Normal forms: what is the same function is one object, and what is not is another."""

import math

import pytest
import torch

from mindspeed_fx.passes.prove import conditions as c
from mindspeed_fx.passes.prove import functions as f
from mindspeed_fx.passes.prove.evaluate import _undefined, leaf
from mindspeed_fx.passes.prove.integers import bounds, floor_div, remainder
from mindspeed_fx.passes.prove.rules.base import RULES
from mindspeed_fx.passes.prove.rules.products import matmul
from mindspeed_fx.passes.prove.sums import reduced, sum_of, whole
from mindspeed_fx.passes.prove.terms import TooLarge, add, const, infinity, mul, of, scale, sub, variable

N = 64
ROW, J, B = (of(variable(name, size)) for name, size in (("i0", N), ("i1", N), ("i2", 4)))


def x(i):
    return f.load("x", (i,), "real")


def mean():
    return scale(sum_of(N, x), 1 / N)


def shifted_softmax():
    top = reduced("amax", N, x)
    total = sum_of(N, lambda j: f.exponential(sub(x(j), top)))
    return mul(f.exponential(sub(x(ROW), top)), f.power(total, -1))


def through_lse():
    lse = f.logarithm(sum_of(N, lambda j: f.exponential(x(j))))
    return f.exponential(sub(x(ROW), lse))


def masked(keep):
    scores = c.choose(keep, x(ROW), scale(infinity(), -1))
    return f.exponential(scores)


def above():
    return c.at_least_zero(sub(J, add(ROW, const(1))))


def below():
    return c.at_least_zero(sub(ROW, add(J, const(8))))


OUT = torch.empty(N, device="meta")


def times_vector():
    w, v = (leaf(name, torch.empty(shape, device="meta")) for name, shape in (("w", (N, 8)), ("v", (8,))))
    return matmul(OUT, w, v).at((ROW,))


def ordered(j):
    """The place of the j-th smallest of x."""
    return whole("order 0 False", [((N,), lambda i: x(*i))], (j,))


SAME = {
    "variance": (
        lambda: scale(sum_of(N, lambda j: f.power(sub(x(j), mean()), 2)), 1 / N),
        lambda: sub(scale(sum_of(N, lambda j: f.power(x(j), 2)), 1 / N), f.power(mean(), 2)),
    ),
    "softmax": (shifted_softmax, through_lse),
    "silu": (
        lambda: mul(x(ROW), f.power(add(const(1), f.exponential(scale(x(ROW), -1))), -1)),
        lambda: scale(mul(x(ROW), add(const(1), f.tanh(scale(x(ROW), 0.5)))), 0.5),
    ),
    "root": (lambda: f.power(f.power(x(ROW), 2), 0.5), lambda: f.absolute(x(ROW))),
    "constants": (lambda: scale(x(ROW), 128**-0.5), lambda: scale(x(ROW), 1 / math.sqrt(128))),
    "digits": (lambda: x(ROW), lambda: x(add(scale(floor_div(ROW, 16), 16), remainder(ROW, 16)))),
    "band": (
        lambda: masked(mul(c.at_least_zero(sub(ROW, J)), c.at_least_zero(sub(add(J, const(7)), ROW)))),
        lambda: masked(c.negate(c.either(above(), below()))),
    ),
    "relu": (lambda: f.maximum(x(ROW), const(0)), lambda: mul(c.is_positive(x(ROW)), x(ROW))),
    "order of sums": (
        lambda: sum_of(
            N, lambda j: mul(f.load("w", (ROW, j), "real"), sum_of(8, lambda k: f.load("v", (j, k), "real")))
        ),
        lambda: sum_of(
            8, lambda k: sum_of(N, lambda j: mul(f.load("w", (ROW, j), "real"), f.load("v", (j, k), "real")))
        ),
    ),
    "one-hot": (
        lambda: sum_of(N, lambda j: mul(c.is_zero(sub(j, ROW)), x(j))),
        lambda: x(ROW),
    ),
    "sum in any order": (
        lambda: sum_of(N, lambda j: f.power(x(ordered(j)), 2)),
        lambda: sum_of(N, lambda j: f.power(x(j), 2)),
    ),
    "matrix times vector": (
        times_vector,
        lambda: sum_of(8, lambda j: mul(f.load("w", (ROW, j), "real"), f.load("v", (j,), "real"))),
    ),
}
OTHER = {
    "eps": (lambda: f.power(add(mean(), const(1e-5)), -0.5), lambda: f.power(add(mean(), const(1e-6)), -0.5)),
    "sign": (lambda: f.sine(x(ROW)), lambda: f.sine(scale(x(ROW), -1))),
    "edge": (
        lambda: masked(c.at_least_zero(sub(ROW, J))),
        lambda: masked(c.at_least_zero(sub(sub(ROW, J), const(1)))),
    ),
    "root of a square": (lambda: f.power(f.power(x(ROW), 2), 0.5), lambda: x(ROW)),
    "place": (lambda: x(ROW), lambda: x(J)),
    "a sum of two orders": (
        lambda: sum_of(N, lambda j: mul(x(j), x(ordered(j)))),
        lambda: sum_of(N, lambda j: f.power(x(j), 2)),
    ),
    "some places in order": (
        lambda: sum_of(N // 2, lambda j: x(ordered(j))),
        lambda: sum_of(N // 2, x),
    ),
    "logarithm of a product": (lambda: f.logarithm(mul(x(ROW), x(J))), lambda: f.logarithm(mul(x(ROW), x(B)))),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_function_is_one_term(name):
    one, other = SAME[name]
    assert one() is other()


@pytest.mark.parametrize("name", OTHER)
def test_another_function_is_another_term(name):
    one, other = OTHER[name]
    assert one() is not other()


def test_quotients_and_ranges_of_indices():
    flat = add(scale(B, N), ROW)
    assert floor_div(flat, N) is B and remainder(flat, N) is ROW
    assert bounds(remainder(ROW, 16)) == (0, 15) and bounds(sub(ROW, J)) == (-63, 63)
    assert floor_div(floor_div(ROW, 4), 4) is floor_div(ROW, 16)
    ids = leaf("ids", OUT.long())
    assert RULES["aten.remainder"](ids, ids, 0).at((ROW,)) is not RULES["aten.remainder"](ids, ids, 1).at((ROW,))


def test_memory_of_truth_values_holds_truth_values():
    flag = _undefined(OUT.bool(), "memory").at((ROW,))
    assert mul(flag, flag) is flag


def test_sums_over_as_many_indices_as_are_tried():
    def nested(sizes, places=()):
        if not sizes:
            return f.load("x", places, "real")
        return sum_of(sizes[0], lambda i: nested(sizes[1:], (*places, i)))

    assert len(nested([2, 3, 4, 5, 6]).terms) == 1
    with pytest.raises(TooLarge, match="a sum over 6 indices"):
        nested([2, 3, 4, 5, 6, 7])
