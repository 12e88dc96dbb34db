"""An inverse that is built row by row becomes solutions of its triangular system."""

import pytest
import torch

from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder
from tests.models import function_agrees

NAME = "canonicalize.forward_substitution"


def inverse(a, first=1, sub=None, between=None, dtype=None):
    """(I + strictly lower a)^-1 by forward substitution, as transformers spells it; ``first``, ``sub`` and ``between``
    make it something else."""
    rows = -a.tril(-1) if sub is None else sub(a)
    for i in range(first, a.shape[-1]):
        row, block = rows[..., i, :i].clone(), rows[..., :i, :i].clone()
        rows[..., i, :i] = row + (row.unsqueeze(-1) * block).sum(-2)
    extra = 0 if between is None else between(rows)
    return rows + torch.eye(a.shape[-1], dtype=a.dtype) + extra


def system(n=5, dtype=torch.float64, batch=(2, 3)):
    torch.manual_seed(0)
    return torch.randn(*batch, n, n, dtype=dtype, requires_grad=True)


def right(n=5, width=4, dtype=torch.float64, batch=(2, 3)):
    return torch.randn(*batch, n, width, dtype=dtype, requires_grad=True)


def masked(a):
    """The other spelling of the strictly lower triangle, and its sign inside."""
    return (-a).masked_fill(torch.ones(a.shape[-2:], dtype=torch.bool).triu(0), 0)


def positive(a):
    return a.tril(-1)


def skips(report):
    return [s.reason for s in report.skipped(NAME)]


@pytest.mark.parametrize("sub", [None, masked, positive])
@pytest.mark.parametrize("batch", [(2, 3), ()], ids=["batched", "alone"])
def test_products_are_solutions(sub, batch):
    def f(a, b, c):
        whole = inverse(a, sub=sub)
        return whole @ b, whole @ c

    report = function_agrees(f, system(batch=batch), right(batch=batch), right(width=2, batch=batch))
    assert report.counts[NAME] == 1 and not skips(report)


@pytest.mark.parametrize("product", [torch.matmul, lambda whole, b: whole.sin() @ b], ids=["product", "inverse"])
def test_systems_of_any_number(product):
    """Sizes in front are symbols: batches of other sizes, the same graph."""

    def f(a, b):
        return product(inverse(a), b)

    with recorder.collecting() as graphs:
        compiled = torch.compile(f, backend="mindspeed", dynamic=True, options={"codegen": "eager"})
        for batch in ((2, 3), (4, 3), (3, 5)):
            given = system(batch=batch), right(batch=batch)
            want, have = (torch.autograd.grad(run(*given).sin().sum(), given) for run in (f, compiled))
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12)
    report = Report(list(graphs), [])
    assert report.counts[NAME] == 1 and not skips(report)


def test_the_inverse_itself():
    report = function_agrees(lambda a: inverse(a).sin(), system())
    assert report.counts[NAME] == 1 and not skips(report)


@pytest.mark.parametrize("rows, count", [(lambda i: slice(None), 1), (lambda i: slice(i + 1), 0)])
def test_whole_rows_with_their_zeros(rows, count):
    """The reference of flash-linear-attention: the row is read twice, with its zeros for all rows of the block."""

    def f(a, b):
        own = -a.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(0), 0)
        for i in range(1, 5):
            own[..., i, :i] = own[..., i, :i].clone() + (
                own[..., i, rows(i), None].clone() * own[..., rows(i), :i].clone()
            ).sum(-2)
        return (own + torch.eye(5, dtype=a.dtype)) @ b

    assert function_agrees(f, system(), right()).counts[NAME] == count


def test_what_does_not_fit_the_system_is_multiplied():
    """A right-hand side that is broadcast."""
    report = function_agrees(lambda a, b: inverse(a) @ b, system(), right(batch=()))
    assert report.counts[NAME] == 1 and not skips(report)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"first": 2}, "row 1 of neg is not what forward substitution makes of it"),
        ({"sub": lambda a: -a}, "nothing says that neg is zero on and above its diagonal"),
        ({"sub": lambda a: -a.tril()}, "nothing says that neg is zero on and above its diagonal"),
        ({"between": lambda rows: rows[..., :1].sum()}, "reads neg, too"),
    ],
)
def test_near_misses(given, reason):
    report = function_agrees(lambda a: inverse(a * 0.1, **given), system())
    assert report.counts[NAME] == 0 and any(reason in r for r in skips(report)), skips(report)


def test_narrow_types_stay():
    report = function_agrees(lambda a: inverse(a * 0.1), system(dtype=torch.bfloat16), tolerance=2e-2)
    assert report.counts[NAME] == 0 and skips(report) == ["torch solves no triangular system in bfloat16"]


def test_rows_whose_gradients_are_off_stay():
    def f(a):
        rows = -(a * 0.1).tril(-1)
        for i in range(1, a.shape[-1]):
            row, block = rows[..., i, :i].clone(), rows[..., :i, :i].clone()
            with torch.no_grad():
                step = (row.unsqueeze(-1) * block).sum(-2)
            rows[..., i, :i] = row + step
        return rows + torch.eye(a.shape[-1], dtype=a.dtype)

    report = function_agrees(f, system())
    assert report.counts[NAME] == 0 and any("no_grad" in r for r in skips(report)), skips(report)


def changed_before(a):
    lower = a.tril(-1)
    lower.mul_(2)
    return -lower


def test_rows_made_of_what_was_changed_stay():
    report = function_agrees(lambda a: inverse(a * 0.1, sub=changed_before), system())
    assert report.counts[NAME] == 0 and skips(report), report.counts


@pytest.mark.parametrize("what, reason", [("row", "not what"), ("block", "outside"), ("step", "outside")])
def test_rounds_that_somebody_else_has_part_in_stay(what, reason):
    def f(a):
        rows, seen = -(a * 0.1).tril(-1), 0
        for i in range(1, a.shape[-1]):
            row, block = rows[..., i, :i].clone(), rows[..., :i, :i].clone()
            if what == "row":
                row.mul_(1.5)
            step = row + (row.unsqueeze(-1) * block).sum(-2)
            rows[..., i, :i] = step
            seen = seen + {"row": 0, "block": block.sum(), "step": step.sum()}[what]
        return rows + torch.eye(a.shape[-1], dtype=a.dtype) + seen

    report = function_agrees(f, system())
    assert report.counts[NAME] == 0 and any(reason in r for r in skips(report)), skips(report)
