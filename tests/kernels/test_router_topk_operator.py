"""The router's choice against scores, masks and divisions written out, in values and gradients."""

import itertools

import pytest
import torch

import mindspeed_fx.kernels  # noqa: F401

ops = torch.ops.mindspeed


def written_out(logits, bias, k, score, groups=1, kept=1, best=1, eps=None, scale=1.0):
    """Expert by expert, in Python."""
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    rows = []
    for row, own in zip((scores if bias is None else scores + bias).tolist(), scores):
        size = len(row) // groups
        of_groups = [sum(sorted(row[g * size : (g + 1) * size])[-best:]) for g in range(groups)]
        stay = sorted(range(groups), key=lambda g: -of_groups[g])[:kept]
        ids = sorted((e for e in range(len(row)) if e // size in stay), key=lambda e: -row[e])[:k]
        weights = own[ids]
        rows.append((weights if eps is None else weights / (weights.sum() + eps), ids))
    return torch.stack([w for w, _ in rows]) * scale, torch.tensor([ids for _, ids in rows])


GROUPS = [(1, 1, 1), (4, 2, 1), (4, 2, 2), (4, 4, 2)]


@pytest.mark.parametrize("score, eps", list(itertools.product(("softmax", "sigmoid"), (None, 0.0, 0.1))))
@pytest.mark.parametrize("groups", GROUPS)
def test_is_what_is_written_out(groups, score, eps):
    torch.manual_seed(0)
    logits = torch.randn(7, 12, dtype=torch.float64, requires_grad=True)
    for bias, scale in ((None, 1.0), (torch.randn(12, dtype=torch.float64), 2.5)):
        args = (logits, bias, 3, score, *groups, eps, scale)
        found, expected = ops.router_topk(*args), written_out(*args)
        assert torch.equal(found[1], expected[1])
        torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=1e-14)
        weights = torch.randn(7, 3, dtype=torch.float64)
        gradients = (torch.autograd.grad((w * weights).sum(), logits)[0] for w, _ in (found, expected))
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-13)


def test_a_softmax_of_the_chosen_is_the_chosen_softmax_over_its_sum():
    logits = torch.randn(5, 8, dtype=torch.float64)
    weights, ids = ops.router_topk(logits, None, 3, "softmax", eps=0.0)
    values, expected = logits.topk(3, -1)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, values.softmax(-1))


def test_a_bias_chooses_and_does_not_weigh():
    bias = torch.zeros(8, requires_grad=True)
    logits = torch.randn(5, 8, requires_grad=True)
    far = torch.arange(8.0)
    weights, ids = ops.router_topk(logits, bias + far, 2, "sigmoid")
    assert torch.equal(ids, torch.tensor([[7, 6]] * 5))
    torch.testing.assert_close(weights, logits.sigmoid()[:, [7, 6]])
    assert torch.autograd.grad(weights.sum(), bias, allow_unused=True, retain_graph=True)[0] is None
    grad = torch.autograd.grad(weights.sum(), logits)[0]
    assert not grad[:, :6].any() and grad[:, 6:].all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 3, 8), (8,)])
def test_any_dimensions_before_the_experts(shape):
    logits = torch.randn(shape, requires_grad=True)
    weights, ids = ops.router_topk(logits, None, 2, "softmax", 4, 2, 2, 1e-20)
    flat = ops.router_topk(logits.reshape(-1, 8), None, 2, "softmax", 4, 2, 2, 1e-20)
    assert weights.shape == ids.shape == (*shape[:-1], 2)
    assert torch.equal(weights.flatten(), flat[0].flatten()) and torch.equal(ids.flatten(), flat[1].flatten())
    assert torch.autograd.grad(weights.sum(), logits)[0].shape == shape


@pytest.mark.parametrize("score, eps", list(itertools.product(("softmax", "sigmoid"), (None, 0.0))))
def test_computes_in_float32(score, eps):
    torch.manual_seed(0)
    logits = torch.randn(32, 8).bfloat16().requires_grad_()
    wide = logits.detach().double().requires_grad_()
    args = (None, 2, score, 1, 1, 1, eps, 2.5)
    (weights, ids), expected = ops.router_topk(logits, *args), ops.router_topk(wide, *args)
    assert weights.dtype == torch.float32 and torch.equal(ids, expected[1])
    torch.testing.assert_close(weights.double(), expected[0], rtol=1e-5, atol=1e-6)
    factor = torch.randn(32, 2)
    found, want = (
        torch.autograd.grad((weights * factor).sum(), logits)[0],
        torch.autograd.grad((expected[0] * factor).sum(), wide)[0],
    )
    assert found.dtype == torch.bfloat16
    assert (found.double() - want).abs().max() <= 2**-8 * want.abs().max()


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(score="relu"), "score is 'relu'; valid: softmax, sigmoid"),
        (dict(k=0), "k is 0; valid: 1 to 12"),
        (dict(k=7, groups=4, kept=2), "k is 7; valid: 1 to 6"),
        (dict(groups=5), "groups of 12 experts"),
        (dict(groups=4, kept=5), "5 of 4 groups"),
        (dict(groups=4, kept=2, best=3), "best is 3"),
        (dict(groups=12, kept=6, best=2), "best is 2 of groups of 1 experts"),
        (dict(scale=0.0), "scale is 0"),
    ],
)
def test_what_does_not_fit_is_refused(given, words):
    given = dict(k=2, score="softmax") | given
    with pytest.raises(ValueError, match=words):
        ops.router_topk(torch.randn(3, 12), None, given.pop("k"), given.pop("score"), **given)
