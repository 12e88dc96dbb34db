"""Rotary embeddings whose minus is somewhere else than in a negation, and whose elements are moved by anything but
``cat``.
"""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models import double, explain, function_agrees

NAME, DIM = "fusion.rope", 8
SIGNS = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.double)


def swapped(x):
    return torch.cat((x[..., DIM // 2 :], x[..., : DIM // 2]), -1)


def by_sign_vector(x, cos, sin):
    return x * cos + swapped(x) * SIGNS * sin


def signs_in_the_graph(x, cos, sin):
    sign = torch.where(torch.arange(DIM) < DIM // 2, -1.0, 1.0).to(x.dtype)
    return x * cos + torch.roll(x, DIM // 2, -1) * (sign * sin)


def sine_with_its_minus(x, cos, sin):
    a, b = sin.chunk(2, -1)
    return torch.addcmul(x * cos, x.roll(DIM // 2, dims=-1), torch.cat((-a, b), -1))


def parts_by_sub(x, cos, sin):
    a, b = x.unflatten(-1, (2, DIM // 2)).unbind(-2)
    c, s = cos[..., : DIM // 2], sin[..., : DIM // 2]
    return torch.cat([torch.sub(a * c, b * s), torch.add(s * a, c * b)], dim=-1)


def minus_of_the_other_turn(x, cos, sin):
    a, b = x.split(DIM // 2, -1)
    return x * cos - torch.cat((b, -a), -1) * sin


def flipped_neighbours(x, cos, sin):
    pairs = x.reshape(*x.shape[:-1], DIM // 2, 2)
    c, s = (t[..., : DIM // 2].unsqueeze(-1) for t in (cos, sin))
    return (pairs * c + pairs.flip(-1) * torch.tensor([-1.0, 1.0], dtype=x.dtype) * s).flatten(-2)


def table_of_pairs(x, cos, sin):
    table = torch.stack((cos[..., : DIM // 2], sin[..., : DIM // 2]), -1)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack((a * table[..., 0] - b * table[..., 1], b * table[..., 0] + a * table[..., 1]), -1).flatten(-2)


def beside_what_passes(x, cos, sin):
    a, b, rest = x.split((2, 2, DIM - 4), -1)
    c, s = cos[..., :2], sin[..., :2]
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


def neighbours_out_of_halves(x, cos, sin):
    a, b = x.chunk(2, -1)
    c, s = cos[..., : DIM // 2], sin[..., : DIM // 2]
    return torch.stack((a * c - b * s, a * s + b * c), -1).reshape(x.shape)


FORMS = (
    by_sign_vector,
    signs_in_the_graph,
    sine_with_its_minus,
    parts_by_sub,
    minus_of_the_other_turn,
    flipped_neighbours,
    table_of_pairs,
    beside_what_passes,
    neighbours_out_of_halves,
)


QUICK = (signs_in_the_graph, parts_by_sub, flipped_neighbours, beside_what_passes)


@pytest.mark.parametrize(
    "form", [pytest.param(f, id=f.__name__, marks=() if f in QUICK else pytest.mark.slow) for f in FORMS]
)
def test_the_minus_may_be_anywhere(form):
    report = function_agrees(form, double(2, 3, 5, DIM), double(5, DIM), double(5, DIM, grad=False))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@pytest.mark.slow
@settings(max_examples=24, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    st.sampled_from(FORMS),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["frozen", "shared", "read again", "plain"]),
    st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_variants(form, heads_last, cast, kind, dtype):
    """Layouts, casts, frozen inputs, a tensor that is rotated twice, other readers of what is between; bfloat16 within
    twice the model's own error.
    """

    def f(x, cos, sin):
        x = x.transpose(1, 2) if heads_last else x
        y = form(x.double(), cos.double(), sin.double()).to(x.dtype) if cast else form(x, cos, sin)
        return (y, form(x, sin, cos)) if kind == "shared" else (y, swapped(x)) if kind == "read again" else y

    x, cos, sin = double(2, 3, 3, DIM, grad=kind != "frozen"), *(double(3, DIM, grad=False) for _ in range(2))
    given = [x.detach().to(dtype).requires_grad_(x.requires_grad), cos.to(dtype), sin.to(dtype)]
    if dtype == torch.float64:
        report = function_agrees(f, *given)
    else:
        report = explain(f, *given)
        exact, plain, ours = (
            f(*(t.detach().double() for t in given)),
            f(*given),
            torch.compile(f, backend="mindspeed", options={"codegen": "eager"})(*given),
        )
        for e, p, o in zip(*(t if isinstance(t, tuple) else (t,) for t in (exact, plain, ours))):
            assert p.dtype == o.dtype and (o.double() - e).abs().max() <= 2 * (p.double() - e).abs().max() + 1e-12
        torch._dynamo.reset()
    assert report.counts[NAME] == (2 if kind == "shared" else 1) and not report.skipped(NAME)


class Rotary(nn.Module):
    """As an outside user may write it: a table with its signs, registered once, and heads last but one."""

    def __init__(self, dim=DIM, length=16):
        super().__init__()
        angles = torch.outer(torch.arange(length).double(), 1e4 ** -(torch.arange(0, dim, 2).double() / dim)).repeat(
            1, 2
        )
        self.register_buffer("cos", angles.cos()[:, None])
        self.register_buffer("sin", (angles.sin() * SIGNS)[:, None])

    def forward(self, x):
        n = x.shape[1]
        return x * self.cos[:n] + x.view(*x.shape[:-1], 2, -1).flip(-2).flatten(-2) * self.sin[:n]


def test_a_module_of_an_outside_user():
    assert function_agrees(Rotary(), double(2, 5, 3, DIM)).counts[NAME] == 1


@pytest.mark.parametrize(
    "f, reason",
    [
        (
            lambda x, c, s: x * c + x[..., [1, 0, 3, 2, 5, 4, 7, 6]] * s,
            "moved by aten.index.Tensor, whose table or matrix is not read",
        ),
        (
            lambda x, c, s: x * c + x @ (torch.eye(DIM, dtype=x.dtype).roll(1, 0)) * s,
            "moved by aten.matmul.default, whose table or matrix is not read",
        ),
        (
            lambda x, c, s: x * c + x.unflatten(-1, (2, 2, 2)).flip(-2).flatten(-3) * s,
            "element 0 of each head turns with element 2",
        ),
        (
            lambda x, c, s: (
                x[..., :4] * c[..., :4] - x[..., 4:] * s[..., :4],
                x[..., 4:] * c[..., :4] + x[..., :4] * s[..., :4],
            ),
            "are not joined again",
        ),
    ],
)
def test_near_misses_say_why(f, reason):
    report = function_agrees(f, double(2, 3, 4, DIM), double(4, DIM, grad=False), double(4, DIM, grad=False))
    assert report.counts[NAME] == 0 and [reason in s.reason for s in report.skipped(NAME)] == [True], report.skipped(
        NAME
    )


@pytest.mark.parametrize(
    "f",
    [
        lambda a, b, w, u: (a * w + b * u).tanh(),
        lambda a, b, w, u: a[..., :4] * w[..., 4:] + b[..., :4] * u[..., 4:],
        lambda a, b, w, u: a * w + a.roll(1, 0) * u,
    ],
)
def test_sums_of_products_that_are_no_rotation_are_not_misses(f):
    report = function_agrees(f, *(double(2, 3, 4, DIM) for _ in range(4)))
    assert report.counts[NAME] == 0 and not report.skipped(NAME)
