"""Log-probabilities that are stacked row by row, as TRL has them, are computed at once and fused as losses are."""

import pytest
import torch
import torch.nn.functional as F

from tests.models import function_agrees

NAME = "canonicalize.stacked_rows"


def selected(logits, index, narrow=False, order=1, dim=-1):
    """TRL's ``selective_log_softmax`` for wide and for narrow types."""
    if narrow:
        rows = []
        for row, own in zip(logits, index):
            rows.append(F.log_softmax(row, dim=dim).gather(dim=-1, index=own.unsqueeze(-1)).squeeze(-1))
        return torch.stack(rows)
    picked = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    return picked - torch.stack([torch.logsumexp(row, dim=dim) for row in list(logits)[::order]])


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(3, 4, 11, dtype=dtype, requires_grad=True), torch.randint(0, 11, (3, 4))


@pytest.mark.parametrize(
    "given, dtype",
    [
        ({}, torch.float64),
        ({"narrow": True}, torch.bfloat16),
        pytest.param({"narrow": True, "dim": 1}, torch.float64, marks=pytest.mark.slow),
    ],
)
def test_becomes_a_loss(given, dtype):
    tolerance = 1e-9 if dtype == torch.float64 else 2e-2
    report = function_agrees(lambda *a: selected(*a, **given), *inputs(dtype), tolerance=tolerance)
    assert report.counts[NAME] == 1 and report.counts["fusion.cross_entropy"] == 1
    assert not report.skipped(NAME)


def test_other_orders_stay():
    report = function_agrees(lambda *a: selected(*a, order=-1), *inputs())
    assert report.counts[NAME] == 0
    assert [s.reason for s in report.skipped(NAME)] == [
        "the rows of stack are not made alike, of each row of a tensor in order"
    ]


def test_logits_never_exist_whole():
    """From the hidden states, where the pass is named: fewer bytes than the logits have."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 4, 5).double().requires_grad_(), torch.randn(11, 5).double().requires_grad_()
    index, scores = torch.randint(0, 11, (3, 4)), torch.randn(3, 4).double()
    report = function_agrees(
        lambda h, w: (selected(h @ w.t(), index) * scores).sum(), hidden, weight,
        enable=["fusion.linear_cross_entropy"],
    )  # fmt: skip
    assert report.counts["fusion.linear_cross_entropy"] == 1
