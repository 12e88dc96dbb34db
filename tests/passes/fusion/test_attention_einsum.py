import pytest
import torch

from tests.models import double, function_agrees

NAME = "fusion.attention"

SPELLINGS = {
    "heads first": ("bnid,bnjd->bnij", "bnij,bnjd->bnid", (2, 4, 6, 8), (2, 4, 6, 8)),
    "XLNet, sequence first": ("ibnd,jbnd->bnij", "bnij,jbnd->ibnd", (6, 2, 4, 8), (6, 2, 4, 8)),
    "keys first, transposed result": ("bjnd,bind->bnij", "bjnd,bnij->bdni", (2, 6, 4, 8), (2, 6, 4, 8)),
    "no heads": ("bqd,bkd->bqk", "bqk,bkd->bqd", (2, 6, 8), (2, 6, 8)),
    "groups of heads that share keys": ("bskgd,btkd->bkgst", "bkgst,btkd->bskgd", (2, 6, 2, 3, 8), (2, 6, 2, 8)),
    "keys already transposed": ("bnid,bndj->bnij", "bnij,bnjd->bnid", (2, 4, 6, 8), (2, 4, 8, 6)),
}


QUICK = ("XLNet, sequence first", "keys first, transposed result", "groups of heads that share keys")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SPELLINGS])
def test_products_spelled_as_einsum(name):
    first, second, q, k = SPELLINGS[name]
    q, k, v = (
        double(*q),
        double(*k),
        double(*k[:-2], k[-1], k[-2]) if "transposed" in name and k[-1] == 6 else double(*k),
    )
    swapped = first.startswith("bj")

    def f(q, k, v):
        weights = (torch.einsum(first, *((k, q) if swapped else (q, k))) * 0.3).softmax(-1)
        return torch.einsum(second, *((v, weights) if swapped else (weights, v)))

    report = function_agrees(f, q, k, v)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert "aten.einsum" not in run.after


def test_an_einsum_that_is_no_product_of_matrices_says_why():
    def summed(q, k, v):
        return torch.einsum("bnij,bnjd->bn", (q @ k.mT).softmax(-1), v)  # everything is summed

    def talking(q, k, v, mix):
        return torch.einsum("bnij,nm->bmij", (q @ k.mT).softmax(-1), mix) @ v

    for f, extra, words in (
        (summed, (), 'einsum("bnij,bnjd->bn"); a product of matrices'),
        (talking, (double(4, 4),), 'the attention weights are mixed by einsum("bnij,nm->bmij")'),
    ):
        report = function_agrees(f, *(double(2, 4, 6, 8) for _ in range(3)), *extra)
        assert report.counts[NAME] == 0 and words in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("spelling", ["causal", "mask", "broadcast", "keys first"])
def test_heads_between_rows_and_columns(spelling):
    """DeepSeek's own code: scores [batch, queries, heads, keys]."""

    def f(q, k, v, mask):
        scores = torch.einsum("bthd,bshd->bsht", k, q) if spelling == "keys first" else None
        scores = torch.einsum("bshd,bthd->bsht", q, k) * 0.3 if scores is None else scores
        if spelling == "causal":
            scores = scores + torch.full((6, 6), float("-inf"), dtype=q.dtype).triu_(1).unsqueeze(1)
        if spelling == "mask":
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        if spelling == "broadcast":
            scores = scores + mask[0].to(q.dtype)
        weights = scores.softmax(dim=-1, dtype=torch.float64).type_as(q)
        return torch.einsum("bsht,bthd->bshd", weights, v)

    report = function_agrees(f, *(double(2, 6, 4, d) for d in (12, 12, 8)), torch.ones(6, 6, dtype=torch.bool).tril())
    assert report.counts[NAME] == 1 and not report.skipped(NAME)
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert "aten.einsum" not in run.after and ("None, True, 0.3" in run.after) == (spelling == "causal")


def test_scores_that_are_read_elsewhere_keep_their_order():
    def f(q, k, v):
        weights = torch.einsum("bshd,bthd->bsht", q, k).softmax(-1)
        return torch.einsum("bsht,bthd->bshd", weights, v), weights

    report = function_agrees(f, *(double(2, 6, 4, 8) for _ in range(3)))
    assert report.counts[NAME] == 0 and report.skipped(NAME)
