"""Attention as libraries and tutorials write it out: softmax by hand, scales that are tensors, heads in five
dimensions, gated masks.
"""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.compat import dynamo
from mindspeed_fx.planning.explain import Report
from mindspeed_fx.report import recorder
from tests.models import explain, function_agrees

NAME, LATER = "fusion.attention", torch.ones(6, 6, dtype=torch.bool).triu(1)
MASK = torch.rand(2, 1, 1, 6, generator=torch.Generator().manual_seed(1)) < 0.8
MASK[..., 0] = True


def scores(q, k):
    return (q @ k.mT * 0.5).masked_fill(LATER, float("-inf"))


def exponentials(s):
    return torch.exp(s - s.amax(-1, keepdim=True))


def weights(s):
    return (e := exponentials(s)) / e.sum(-1, keepdim=True)


def hidden(s):
    """Masked after the exponential."""
    e = torch.exp(s) * (~LATER).to(s.dtype)
    return e / e.sum(-1, keepdim=True)


def again(s):
    """Weights masked and normalized once more."""
    w = s.softmax(-1).masked_fill(LATER, 0.0)
    return w / w.sum(-1)[..., None]


WEIGHTS = {
    "sums": lambda s: (e := s.exp()) / e.sum(-1, keepdim=True),
    "greatest": weights,
    "greatest, detached": lambda s: (e := torch.exp(s - s.detach().max(-1, keepdim=True)[0])) / e.sum(-1).unsqueeze(-1),
    "greatest of all": lambda s: (e := torch.exp(s - s.max())) * (1 / e.sum(-1, keepdim=True)),
    "reciprocal": lambda s: (e := exponentials(s)) * e.sum(-1, keepdim=True).reciprocal(),
    "exp(log_softmax)": lambda s: s.log_softmax(-1).exp(),
    "log-sum-exp": lambda s: (s - s.logsumexp(-1)[..., None]).exp(),
    "log-sum-exp by hand": lambda s: (y := s - s.amax(-1, True)).sub(y.exp().sum(-1, keepdim=True).log()).exp(),
    "moved": lambda s: (s - s.max(-1, keepdim=True).values).softmax(-1),
}
SPELLINGS = {
    **{name: lambda q, k, v, one, each, w=w: w(scores(q, k)) @ v for name, w in WEIGHTS.items()},
    "normalized last": lambda q, k, v, one, each: ((e := exponentials(scores(q, k))) @ v) / e.sum(-1, keepdim=True),
    "masked exponentials": lambda q, k, v, one, each: hidden(q @ k.mT) @ v,
    "masked and normalized again": lambda q, k, v, one, each: again(q @ k.mT) @ v,
    "trained scale": lambda q, k, v, one, each: (q @ k.mT * one).masked_fill(LATER, float("-inf")).softmax(-1) @ v,
    "root of a tensor": lambda q, k, v, one, each: (q @ k.mT / torch.tensor(k.shape[-1]).sqrt()).softmax(-1) @ v,
    "scale for each head": lambda q, k, v, one, each: (
        (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * each.exp()).softmax(-1) @ v
    ),
    "grouped, matmul": lambda q, k, v, one, each: (
        (q.view(2, 2, 2, 6, 4) @ k[:, :2, None].mT).masked_fill(LATER, -1e9).softmax(-1) @ v[:, :2, None]
    ),
    "grouped, masked": lambda q, k, v, one, each: (
        (q.view(2, 2, 2, 6, 4) @ k[:, :2].unsqueeze(2).mT).masked_fill(~MASK[:, :, None], -1e9).softmax(-1)
        @ v[:, :2].unsqueeze(2)
    ),
    "grouped, einsum": lambda q, k, v, one, each: torch.einsum(
        "bkgst,bktd->bskgd", torch.einsum("bkgsd,bktd->bkgst", q.view(2, 2, 2, 6, 4), k[:, :2]).softmax(-1), v[:, :2]
    ),
    "groups before heads": lambda q, k, v, one, each: torch.einsum(
        "bghnm,bhmd->bghnd", torch.einsum("bghnd,bhmd->bghnm", q.view(2, 2, 2, 6, 4), k[:, :2]).softmax(-1), v[:, :2]
    ),
    "latent queries": lambda q, k, v, one, each: (q[:1] @ k.mT).softmax(-1) @ v,
    "one head for all": lambda q, k, v, one, each: (q @ k[:, :1].mT).softmax(-1) @ v[:, :1],
    "no heads": lambda q, k, v, one, each: (q[0, 0] @ k[0, 0].T).softmax(-1) @ v[0, 0],
    "GPT, boolean": lambda q, k, v, one, each: ((q @ k.mT) * (m := MASK.to(q.dtype)) - 1e4 * (1 - m)).softmax(-1) @ v,
    "GPT, boolean, added": lambda q, k, v, one, each: (
        ((m := MASK.to(q.dtype)) * (q @ k.mT) + (m - 1) * 1e9).softmax(-1) @ v
    ),
    "cleared by a product": lambda q, k, v, one, each: (scores(q, k).softmax(-1) * ~LATER) @ v,
    "cleared by where": lambda q, k, v, one, each: torch.where(LATER, 0, scores(q, k).softmax(-1)) @ v,
    "scores turned": lambda q, k, v, one, each: (k @ q.mT).mT.softmax(-1).clone() @ v,
    "channels first": lambda q, k, v, one, each: torch.bmm(
        v.flatten(0, 1).mT.contiguous(),
        (torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT) * 0.5).softmax(2).permute(0, 2, 1),
    ),
    "moved before the mask": lambda q, k, v, one, each: (
        (s := q @ k.mT).sub(s.amax(-1, True)).masked_fill(LATER, float("-inf")).softmax(-1) @ v
    ),
}


def inputs(dtype=torch.double):
    torch.manual_seed(0)
    return [
        torch.randn(s, dtype=torch.double).to(dtype).requires_grad_()
        for s in ((2, 4, 6, 4), (2, 4, 6, 4), (2, 4, 6, 4), (), (4, 1, 1))
    ]


def test_every_third_spelling_in_one_graph():
    spellings = list(SPELLINGS.values())[::3]
    report = function_agrees(lambda *given: tuple(f(*given) for f in spellings), *inputs())
    assert report.counts[NAME] == len(spellings) and not report.skipped(NAME), report.skipped(NAME)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling(name):
    assert function_agrees(SPELLINGS[name], *inputs()).counts[NAME] == 1


OTHERS = {
    "more than their sum (add": lambda e: e / (e.sum(-1, keepdim=True) + 1e-6),
    "more than their sum (add_1": lambda e: e / (1 + e.sum(-1, keepdim=True)),
    "more than their sum (clamp_min": lambda e: e / e.sum(-1, keepdim=True).clamp_min(1e-6),
    "more than their sum (detach": lambda e: e / e.sum(-1, keepdim=True).detach(),
    "multiplied by a tensor": lambda e: (m := e * torch.linspace(0, 1, 6, dtype=e.dtype)) / m.sum(-1, keepdim=True),
    "read by others": lambda e: (p := e.log().log_softmax(-1)).exp() * p,
    "bounded or moved first": lambda e: torch.log(e.softmax(-1) + 1e-9),
}


def test_other_functions_say_why_they_are_no_softmax():
    report = explain(
        lambda x: tuple(f(exponentials(x)).cos() for f in OTHERS.values()), torch.randn(2, 6, 6, requires_grad=True)
    )
    assert report.counts["canonicalize.softmax"] == 0
    for reason, skipped in zip(OTHERS, report.skipped("canonicalize.softmax"), strict=True):
        assert reason in skipped.reason


def test_what_is_subtracted_and_trained_keeps_its_gradient_of_zeros():
    def f(x, m):
        return (e := torch.exp(x - m)) / e.sum(-1, keepdim=True)

    x, m = (
        torch.randn(2, 6, dtype=torch.double, requires_grad=True),
        torch.randn(2, 1, dtype=torch.double, requires_grad=True),
    )
    out = torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager"})(x, m)
    (gradient,) = torch.autograd.grad(out.square().sum(), [m])  # raises where nothing leads to m
    assert gradient.abs().max() < 1e-12 and (out - x.softmax(-1)).abs().max() < 1e-12


def batch_in_one(q, k, v, pad, rest):
    """fairseq's, ESM's: batch and heads are one dimension but where the padding is masked."""
    one = [x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    s = torch.bmm(one[0], one[1].transpose(1, 2))
    s = rest(s)
    s = s.view(*q.shape[:2], 6, 6).masked_fill(pad.unsqueeze(1).unsqueeze(2), float("-inf")).view(-1, 6, 6)
    return torch.bmm(s.softmax(-1), one[2]).view(q.shape)


@pytest.mark.parametrize(
    "rest",
    [
        lambda s: s,
        lambda s: s + torch.full((6, 6), float("-inf"), dtype=s.dtype).triu(1).unsqueeze(0),
        lambda s: s + torch.linspace(0, 1, s.numel(), dtype=s.dtype).view(s.shape),
    ],
    ids=["padding", "causal too", "bias of each head too"],
)
def test_padding_of_scores_that_have_batch_and_heads_in_one(rest):
    pad = torch.zeros(2, 6, dtype=torch.bool)
    pad[0, -2:] = True
    q, k, v = (torch.randn(2, 3, 6, 4, dtype=torch.double, requires_grad=True) for _ in range(3))
    report = function_agrees(lambda *a: batch_in_one(*a, rest), q, k, v, pad)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


def test_padding_of_scores_that_have_batch_and_heads_apart_at_the_softmax_alone():
    pad = torch.zeros(2, 6, dtype=torch.bool)
    pad[0, -2:] = True
    q, k, v = (torch.randn(2, 2, 3, 6, 4, dtype=torch.double, requires_grad=True) for _ in range(3))

    def attend(q, k, v, pad):
        s = (q @ k.mT).view(2, 6, 6, 6).masked_fill(pad[:, None, None], float("-inf"))
        return s.view(4, 3, 6, 6).softmax(-1) @ v.reshape(4, 3, 6, 4)

    assert function_agrees(attend, q, k, v, pad).counts[NAME] == 1


@pytest.mark.parametrize("shared", [True, False], ids=["one for all heads", "one for each head"])
def test_masks_of_windows(shared):
    """Swin's: batch and windows are one dimension but where the mask of each window is added."""
    mask = torch.zeros(3, 1 if shared else 2, 6, 6, dtype=torch.double)
    mask[1, ..., :2] = -100.0
    bias = torch.randn(2, 6, 6, dtype=torch.double)
    q, k, v = (torch.randn(6, 2, 6, 4, dtype=torch.double, requires_grad=True) for _ in range(3))

    def attend(q, k, v, bias, mask):
        s = q @ k.transpose(-2, -1) + bias.unsqueeze(0)
        s = s.view(2, 3, 2, 6, 6) + mask.unsqueeze(0)
        return s.view(-1, 2, 6, 6).softmax(-1) @ v

    report = function_agrees(attend, q, k, v, bias, mask)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


def test_heads_of_five_dimensions_where_two_sizes_are_symbols():
    """Rows of an alignment (OpenFold): batch and rows times heads is the size of nothing in the graph."""

    def attend(q, k, v, mask):
        return (q @ k.transpose(-2, -1) + mask).softmax(-1) @ v

    compiled = torch.compile(attend, backend="mindspeed", options={"codegen": "eager"}, dynamic=True)
    with recorder.collecting() as graphs, dynamo.recompiling():
        for rows, seq in ((3, 6), (4, 7)):
            q, k, v = (torch.randn(2, rows, 2, seq, 4, dtype=torch.double) for _ in range(3))
            mask = torch.zeros(2, rows, 1, 1, seq, dtype=torch.double)
            mask[0, ..., -2:] = -1e9
            torch.testing.assert_close(compiled(q, k, v, mask), attend(q, k, v, mask))
    assert len(graphs) == 1 and Report(list(graphs), []).counts[NAME] == 1
