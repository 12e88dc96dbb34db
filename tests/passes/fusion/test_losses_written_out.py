"""Cross-entropy as tutorials and libraries write it out: one-hot and smoothed targets, picked values, sums of
exponentials.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.models import function_agrees

NAME = "fusion.cross_entropy"
ROWS = torch.tensor([0, 3, 1, 6, 2])


def hot(x):
    return F.one_hot(ROWS, 7).to(x.dtype)


def fairseq(x, target=ROWS, epsilon=0.1, ignored=1):
    """label_smoothed_nll_loss"""
    probs, target = F.log_softmax(x, -1), target.unsqueeze(-1)
    nll, smooth = -probs.gather(-1, target), -probs.sum(-1, keepdim=True)
    mask = target.eq(ignored)
    nll.masked_fill_(mask, 0.0)
    smooth.masked_fill_(mask, 0.0)
    nll, smooth = nll.sum(), smooth.sum()
    share = epsilon / (probs.size(-1) - 1)
    return (1.0 - epsilon - share) * nll + share * smooth, nll


def label_smoother(x):
    """Of transformers' trainer."""
    probs, labels = -F.log_softmax(x, -1), ROWS[:, None]
    mask = labels.eq(-100)
    nll, smooth = probs.gather(-1, labels.clamp(min=0)), probs.sum(-1, keepdim=True, dtype=x.dtype)
    nll.masked_fill_(mask, 0.0)
    smooth.masked_fill_(mask, 0.0)
    active = mask.numel() - mask.long().sum()
    return 0.9 * nll.sum() / active + 0.1 * smooth.sum() / (active * probs.shape[-1])


def smoothed_by_scatter(x):
    target = torch.zeros_like(x).fill_(0.1 / 6).scatter_(1, ROWS[:, None], 0.9)
    return -(target * x.log_softmax(-1)).sum(-1).mean()


def by_counts(x):
    shifted = x - x.max(1, keepdim=True).values
    counts = shifted.exp()
    return -((counts * counts.sum(1, keepdim=True) ** -1).log())[range(5), ROWS].mean()


SPELLINGS = {
    "log(softmax)": lambda x: F.nll_loss(torch.log(x.softmax(-1)), ROWS),
    "log of picked": lambda x: -torch.log(x.softmax(-1)[torch.arange(5), ROWS]).mean(),
    "log of gathered": lambda x: -x.softmax(-1).gather(1, ROWS[:, None]).squeeze(1).log().mean(),
    "by counts": by_counts,
    "normalized": lambda x: -(x - x.exp().sum(1, keepdim=True).log())[torch.arange(5), ROWS].mean(),
    "log-sum-exp with the maximum": lambda x: (
        lambda m: ((x - m[:, None]).exp().sum(-1).log() + m - x.gather(1, ROWS[:, None])[:, 0]).mean()
    )(x.amax(-1)),
    "log of a sum": lambda x: (x.exp().sum(-1).log() - x.take_along_dim(ROWS[:, None], 1)[:, 0]).mean(),
    "one-hot": lambda x: -(hot(x) * x.log_softmax(-1)).sum(-1).mean(),
    "one-hot, whole sum": lambda x: -(F.one_hot(ROWS, 7) * x.log_softmax(1)).sum() / 5,
    "one-hot, einsum": lambda x: -torch.einsum("nc,nc->n", hot(x), x.log_softmax(1)).mean(),
    "one-hot, mean": lambda x: -(x.log_softmax(1) * hot(x)).mean(),
    "identity": lambda x: -(torch.eye(7, dtype=x.dtype)[ROWS] * x.log_softmax(-1)).sum(-1).mean(),
    "comparison": lambda x: -x.log_softmax(-1).masked_fill(torch.arange(7) != ROWS[:, None], 0).sum(-1).mean(),
    "where": lambda x: -torch.where(torch.arange(7) == ROWS[:, None], x.log_softmax(-1), 0).sum(-1).mean(),
    "log-sum-exp less one-hot": lambda x: (x.logsumexp(-1) - (hot(x) * x).sum(-1)).mean(),
    "smoothed one-hot": lambda x: -((hot(x) * 0.9 + 0.1 / 7) * x.log_softmax(-1)).sum(-1).mean(),
    "smoothed by scatter": smoothed_by_scatter,
    "cross_entropy, one-hot": lambda x: F.cross_entropy(x, hot(x)),
    "cross_entropy, smoothed one-hot": lambda x: F.cross_entropy(
        x, 0.9 * hot(x) + 0.1 / 7, reduction="sum", label_smoothing=0.1
    ),
    "three dimensions": lambda x: (
        -x.view(1, 5, 7).log_softmax(-1)[torch.arange(1)[:, None], torch.arange(5)[None], ROWS[None]].mean()
    ),
    "shifted": lambda x: -x.view(1, 5, 7).log_softmax(-1)[:, :-1].reshape(-1, 7).gather(-1, ROWS[:4, None]).mean(),
    "fairseq": lambda x: fairseq(x)[0],
    "transformers": label_smoother,
}


def logits(dtype=torch.double):
    torch.manual_seed(2)
    return torch.randn(5, 7, dtype=torch.double).to(dtype).requires_grad_()


def test_every_spelling_in_one_graph():
    report = function_agrees(lambda x: tuple(f(x) for f in SPELLINGS.values()), logits())
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == len(SPELLINGS) and not report.skipped(NAME), report.skipped(NAME)
    assert not any(f"aten.{name}" in run.after for name in ("log_softmax", "logsumexp", "exp", "softmax"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling(name):
    assert function_agrees(SPELLINGS[name], logits()).counts[NAME] == 1


def test_what_is_reported_beside_the_smoothed_loss_reads_the_logits():
    """fairseq logs the likelihood without its smoothing, tensor2tensor the mean of all."""

    def both(x):
        loss, nll = fairseq(x)
        return loss, nll.detach(), fairseq(x, ignored=0)[1]

    report = function_agrees(both, logits())
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 2 and "aten.log_softmax" not in run.after


def test_the_greatest_of_a_row_is_read_from_the_logits_and_that_of_a_column_is_not():
    def f(x, dim):
        probs = x.log_softmax(-1)
        return probs.gather(1, ROWS[:, None]).sum(), probs.argmax(dim)

    x = logits() + 3 * torch.arange(5.0)[:, None]  # the rows' normalizers decide what is greatest in a column
    assert function_agrees(lambda x: f(x, 1), x).counts[NAME] == 1
    for dim in (0, None):
        report = function_agrees(lambda x: f(x, dim), x.detach().requires_grad_())
        assert report.counts[NAME] == 0 and "also read by argmax" in report.skipped(NAME)[0].reason


def test_log_probabilities_by_frames_stay_as_they_are():
    # As CTC wants them, [frames, batch, classes]: a view of the logits first would need a copy after it, whose views
    # were moved before the next log-softmax, and so on without an end.
    # Dynamo breaks the graph before ctc_loss, which sees the layout.
    x = torch.randn(2, 5, 8, dtype=torch.double, requires_grad=True)
    report = function_agrees(lambda x: F.log_softmax(x, -1).transpose(0, 1), x)
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts.get(NAME, 0) == 0 and "aten.contiguous" not in run.after


def test_large_float16_logits_do_not_overflow_once_fused():
    x = (torch.arange(35).view(5, 7) - 3.0).half().requires_grad_()
    f = lambda x: (x.exp().sum(-1).log() - x.gather(1, ROWS[:, None])[:, 0]).sum()  # noqa: E731
    assert not f(x).isfinite()
    loss = torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})(x)
    assert (
        torch.allclose(loss.float(), F.cross_entropy(x.float(), ROWS, reduction="sum"), rtol=1e-2)
        and torch.autograd.grad(loss, x)[0].isfinite().all()
    )
