"""Sums and products under vmap become those of whole tensors; what else is under vmap stays as it is."""

import pytest
import torch

from tests.models import double, function_agrees

NAME = "canonicalize.batched_arithmetic"


@pytest.mark.parametrize(
    "f, outs, rewrites, reasons",
    [
        (lambda a, b: a * b + a, 0, 1, []),
        (lambda a, b: (a + b, b * b), 0, 1, []),
        (lambda a, b: a * b + a, 1, 0, []),
        (lambda a, b: a * b + 1, 0, 0, []),
        (lambda a, b: torch.sin(a) * b, 0, 0, []),
        (lambda a, b: a * b.T, 0, 0, []),
    ],
)
def test_of_two_matrices(f, outs, rewrites, reasons):
    report = function_agrees(torch.func.vmap(f, out_dims=outs), double(3, 4, 4), double(3, 4, 4), tolerance=0)
    assert report.counts[NAME] == rewrites and [s.reason for s in report.skipped(NAME)] == reasons


def test_ranks_that_differ_meet_at_other_dimensions_under_vmap():
    """[3, 4] + [3, 3, 4] adds rows, under vmap a row of each."""
    report = function_agrees(torch.func.vmap(lambda a, b: a + b), double(3, 4), double(3, 3, 4))
    assert report.counts[NAME] == 0
    assert [s.reason for s in report.skipped(NAME)] == ["values of different numbers of dimensions meet under vmap"]


def test_of_a_batch_in_another_place():
    report = function_agrees(torch.func.vmap(lambda a, b: a + b, in_dims=(1, 0)), double(4, 3), double(3, 4))
    assert report.counts[NAME] == 0


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: torch.func.vmap(lambda a: a * y)(x),
        lambda x, y: torch.func.vmap(lambda a: a + y)(x).sum(1),
        lambda x, y: torch.func.vmap(lambda a, b: a + b)(x, b=y).sum(),
        lambda x, y: torch.func.vmap(lambda a, b: a * b, in_dims=(0, None))(x, y).sum(0),
        lambda x, y: torch.func.vmap(lambda a: y * y)(x) * x.sum(),
        lambda x, y: torch.func.vmap(lambda a: (a + a, y))(x)[1] * x.sum(),
        lambda x, y: torch.func.vmap(torch.func.vmap(lambda a: y * a))(x).sum((0, 1)),
        lambda x, y: torch.func.vmap(lambda a: torch.func.vmap(lambda b: a + b)(y))(x).sum(0),
        lambda x, y: torch.func.vmap(torch.func.vmap(lambda a, b: a + b, (0, None)), (None, 0))(x, y).sum(1),
    ],
)
def test_of_a_value_without_the_batch(f):
    """Each row meets all of it."""
    report = function_agrees(f, double(3, 3), double(3, 3))
    assert report.counts[NAME] == 0


def test_of_any_number_of_rows():
    """The size is an argument of what vmap runs."""
    f = torch.compile(
        torch.func.vmap(lambda a, b: a * b + a), backend="mindspeed", dynamic=True, options={"codegen": "eager"}
    )
    for rows in (3, 5):
        a, b = double(rows, 4), double(rows, 4)
        assert torch.equal(f(a, b), a * b + a)
