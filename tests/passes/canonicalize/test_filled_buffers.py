"""A buffer that is filled by slices is its pieces, joined; whatever reads it earlier, or leaves a part, stays."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.models import function_agrees

NAME = "canonicalize.filled_buffers"


def keys(a, b):
    """Latent attention's: the second piece is one for all heads, and of another type."""
    out = a.new_empty(*a.shape[:-1], a.shape[-1] + b.shape[-1])
    out[..., : a.shape[-1]].copy_(a)
    out[..., a.shape[-1] :].copy_(b.expand(*a.shape[:-1], -1))
    return out.transpose(1, 2) * 2


def pairs(a, b):
    out = torch.empty(*a.shape[:-1], 2 * a.shape[-1], dtype=a.dtype)
    out[..., ::2] = a
    out[..., 1::2] = b
    return out.sin()


def rows(a, b):
    out = torch.zeros(a.shape[0], a.shape[1] + b.shape[1], a.shape[2], dtype=a.dtype)
    out[:, a.shape[1] :] = b
    out[:, : a.shape[1]] = a
    return out, out + 1


def made(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "function, shapes",
    [(keys, ((2, 3, 5, 4), (2, 1, 5, 2))), (pairs, ((2, 3, 4), (2, 3, 4))), (rows, ((2, 3, 4), (2, 5, 4)))],
)
def test_pieces_are_joined(function, shapes, dtype):
    torch.manual_seed(0)
    report = function_agrees(function, *(made(*s, dtype=dtype) for s in shapes), tolerance=0)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@settings(max_examples=15, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.integers(0, 2), st.randoms(use_true_random=False))
def test_any_number_of_pieces_in_any_order(sizes, dim, random):
    order = list(range(len(sizes)))
    random.shuffle(order)
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]

    def function(*values):
        shape = list(values[0].shape)
        shape[dim] = starts[-1]
        out = values[0].new_empty(shape)
        for i in order:
            out.narrow(dim, starts[i], sizes[i]).copy_(values[i])
        return out.cos()

    shapes = [[3] * dim + [n] + [3] * (2 - dim) for n in sizes]
    report = function_agrees(function, *(made(*s) for s in shapes), tolerance=0)
    assert report.counts[NAME] == 1


def read_early(a, b):
    out = a.new_empty(2, 8)
    out[:, :4] = a
    y = out[:, :4].sum()
    out[:, 4:] = b
    return out * y


def overlapping(a, b):
    out = a.new_empty(2, 7)
    out[:, :4] = a
    out[:, 3:] = b
    return out * 2


def changed_between(a, b):
    c = a * 2
    top, out = c[0], a.new_empty(2, 8)
    out[:, :4] = c
    top.add_(1)
    out[:, 4:] = b
    return out, c


def without_gradients(a, b):
    out = a.new_empty(2, 8)
    with torch.no_grad():
        out[:, :4] = a
    out[:, 4:] = b
    return out * 2


@pytest.mark.parametrize(
    "function, reason",
    [
        (read_early, "new_empty is read before its last piece is written"),
        (overlapping, "copies into slices do not fill new_empty along one dimension"),
        (changed_between, "add_ writes in place between the pieces"),
        (without_gradients, "part of the pieces is written with gradients off (torch.no_grad)"),
    ],
)
def test_what_stays(function, reason):
    report = function_agrees(function, made(2, 4), made(2, 4))
    assert report.counts[NAME] == 0
    assert [s.reason for s in report.skipped(NAME)] == [reason]


def test_a_pad_is_no_near_miss():
    def pad(a):
        out = torch.zeros(2, 8, dtype=a.dtype)
        out[:, :4] = a
        return out * 2

    report = function_agrees(pad, made(2, 4))
    assert report.counts[NAME] == 0 and not report.skipped(NAME)
