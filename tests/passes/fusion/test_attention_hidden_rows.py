"""Rows of an attention that two masks hide whole, each by a number of its own."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.models import function_agrees
from tests.passes.fusion.test_attention import NAME, causal, qkv


def itself(s):
    return torch.arange(s)[:, None] == torch.arange(s)


def number(mask, n, dtype):
    return torch.where(mask, n, 0.0).to(dtype)


TWICE = {
    "set, set": lambda a, s, later, own: a.masked_fill(causal(s), later).masked_fill(itself(s), own),
    "set, added": lambda a, s, later, own: a.masked_fill(causal(s), later) + number(itself(s), own, a.dtype),
    "added, set": lambda a, s, later, own: (a + number(itself(s), own, a.dtype)).masked_fill(causal(s), later),
    "added, added": lambda a, s, later, own: a + number(causal(s), later, a.dtype) + number(itself(s), own, a.dtype),
}


@pytest.mark.parametrize("later, own", [(-1e9, -5e4), (-5e4, -1e9), (-math.inf, -1e9)])
@pytest.mark.parametrize("kind", TWICE)
def test_of_two_numbers_the_higher_one_has_the_weight(kind, later, own):
    """A token that sees itself only where it sees no other, as the first one does here."""

    def f(q, k, v):
        return F.softmax(TWICE[kind](q @ k.transpose(-1, -2), q.shape[-2], later, own), -1) @ v

    report = function_agrees(f, *qkv())
    (skip,) = report.skipped(NAME)
    assert report.counts[NAME] == 0 and f"{own:g}" in skip.reason
    assert skip.reason.endswith("may hide a query's own key: a row that they hide whole has weights of its own")


@pytest.mark.parametrize("later, count", [(-1e9, 0), (-5e4, 1)])
def test_masks_of_what_is_sorted(later, count):
    """Reformer's: tokens stand in an order that only the run knows. With one number the row is the mean of all."""
    order = torch.tensor([3, 0, 5, 1, 4, 2])

    def f(q, k, v, order):
        scores = (q @ k.transpose(-1, -2)).masked_fill(order[:, None] < order[None, :], later)
        scores = scores.masked_fill(order[:, None] == order[None, :], -5e4)
        return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v

    assert function_agrees(f, *qkv(), order).counts[NAME] == count


@pytest.mark.parametrize("expanded", [False, True])
def test_padding_hides_rows_that_nobody_reads(expanded):
    kept = torch.ones(2, 6, dtype=torch.bool)
    kept[0, :2] = False

    def f(q, k, v, kept):
        padding = kept[:, None, None, :]
        if expanded:
            padding = padding.expand(2, 1, 6, 6).to(q.dtype) > 0.5
        scores = (q @ k.transpose(-1, -2)).masked_fill(causal(6), -1e9).masked_fill(~padding, -5e4)
        return (F.softmax(scores, -1) @ v).masked_fill(~kept[:, None, :, None], 0.0)

    report = function_agrees(f, *qkv(), kept)
    assert report.counts[NAME] == 1
    notes = next(r for r in report.graphs[0].runs if r.report.name == NAME).report.notes
    assert any("-1000000000.0 and -50000.0" in note for note in notes)
