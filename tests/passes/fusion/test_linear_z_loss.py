"""A z-loss over the tokens of the loss is computed with the chunks of logits."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.passes.fusion import linear_cross_entropy as fusion
from tests.models import function_agrees

NAME = "fusion.linear_cross_entropy"
TARGET = torch.tensor([1, 2, -100, 0, 3, 4, 3, 3, 1, 0, -100, 6])
KEPT = TARGET != -100


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(fusion, "SMALLEST", 0)
    monkeypatch.setattr(fusion, "SMALLEST_CPP", 0)


def mean(hidden, weight):
    logits = F.linear(hidden, weight)
    kept = TARGET != -100
    z = (logits.logsumexp(-1).square() * kept).sum() / kept.sum()
    return F.cross_entropy(logits, TARGET) + 0.3 * z


def smoothed_sum(hidden, weight):
    logits = hidden @ weight.t()
    z = torch.logsumexp(logits, -1, keepdim=True).pow(2).squeeze(-1) * 0.1 * TARGET.ne(-100).to(logits.dtype)
    return z.sum() * 2 + F.cross_entropy(logits, TARGET, reduction="sum", label_smoothing=0.2)


def scaled_before(hidden, weight):
    logits = F.linear(hidden, weight)
    kept = (TARGET != -100).double()
    return F.cross_entropy(logits, TARGET) + ((0.5 * logits.logsumexp(-1)) ** 2 * kept).sum() / kept.sum() / 4


def inputs():
    return [torch.randn(*shape, dtype=torch.double, requires_grad=True) for shape in ((12, 5), (7, 5))]


@pytest.mark.parametrize("form", [mean, smoothed_sum, pytest.param(scaled_before, marks=pytest.mark.slow)])
def test_one_operator(form):
    report = function_agrees(form, *inputs())
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@pytest.mark.parametrize(
    "form, reason",
    [
        (
            lambda h, w: (lambda x: F.cross_entropy(x, TARGET) + x.logsumexp(-1).square().mean())(F.linear(h, w)),
            "its mean is over all tokens",
        ),
        pytest.param(
            lambda h, w: (lambda x: F.cross_entropy(x, TARGET) + (x.logsumexp(-1).square() * (TARGET != -100)).sum())(
                F.linear(h, w)
            ),
            "is not reduced over the tokens of the loss",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda h, w: (
                lambda x: F.cross_entropy(x, TARGET) + (x.logsumexp(-1).square() * (TARGET != 3)).sum() / KEPT.sum()
            )(F.linear(h, w)),
            "(aten.mul.Tensor)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_others_say_why_not(form, reason):
    report = function_agrees(form, *inputs())
    assert report.counts[NAME] == 0 and len(report.skipped(NAME)) == 1 and reason in report.skipped(NAME)[0].reason, (
        report.skipped(NAME)
    )
