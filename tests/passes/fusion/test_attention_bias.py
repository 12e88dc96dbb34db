"""Attention whose scores are more than a product with one mask: trained biases, several masks, sinks of each query,
cleared weights.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.models import double, function_agrees

NAME = "fusion.attention"
INF = float("-inf")


def qkv(*lead, seq=6, dim=8):
    return [double(*lead, seq, dim) for _ in range(3)]


def keep(s=6):
    return (torch.arange(s)[:, None] * 7 + torch.arange(s) * 3) % 5 > 1


def scaled(q, k, bias):
    return (q @ k.mT + bias) * 0.5


FORMS = {
    "by head": ((4, 6, 6), lambda q, k, b: q @ k.mT * 0.3 + b),
    "of every score, causal": (
        (2, 4, 6, 6),
        lambda q, k, b: (q @ k.mT + b).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), INF),
    ),
    "by key, scaled": ((2, 1, 1, 6), scaled),
    "with a second bias and a boolean mask": (
        (6, 6),
        lambda q, k, b: (scaled(q, k, b) + torch.arange(6.0, dtype=b.dtype)).masked_fill(
            ~(keep() | torch.eye(6, dtype=torch.bool)), INF
        ),
    ),
    "subtracted": ((1, 6), lambda q, k, b: (q @ k.mT + 0.0) - b),
}


QUICK = ("by head", "with a second bias and a boolean mask")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FORMS])
def test_a_bias_has_its_gradient(name):
    shape, scores = FORMS[name]
    report = function_agrees(lambda q, k, v, b: F.softmax(scores(q, k, b), -1) @ v, *qkv(2, 4), double(*shape))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


def streams(q, k, v, b):
    """ProphetNet's predicted streams: [batch, streams, heads, seq, keys]."""
    return torch.einsum("bnhts,bnhsc->bnhtc", (torch.einsum("bnhtc,bnhsc->bnhts", (q, k)) + b).softmax(-1), v)


def test_a_bias_of_more_dimensions():
    assert function_agrees(streams, *qkv(2, 2, 3), double(2, 1, 3, 6, 6)).counts[NAME] == 1


@pytest.mark.slow
@pytest.mark.parametrize("enable", [[], [NAME]])
def test_where_code_is_generated_a_trained_bias_is_fused_on_request(enable):
    report = function_agrees(streams, *qkv(2, 2, 3), double(2, 1, 3, 6, 6), codegen="inductor", enable=enable)
    assert report.counts[NAME] == len(enable) and (
        enable or "generated code is faster" in report.skipped(NAME)[0].reason
    )


def test_sixteen_bit_biases_are_as_close_as_the_unfused_form():
    def f(q, k, v, b):
        return ((q @ k.mT * 0.3 + b).softmax(-1) @ v).sum()

    given = [t.detach().bfloat16().requires_grad_() for t in (*qkv(2, 4), double(4, 6, 6))]
    gradients = [
        torch.cat([g.double().flatten() for g in torch.autograd.grad(run(*values), values)])
        for run, values in (
            (f, [t.detach().double().requires_grad_() for t in given]),
            (f, given),
            (torch.compile(f, backend="mindspeed", options={"codegen": "eager"}), given),
        )
    ]
    exact, unfused, fused = gradients
    assert (fused - exact).norm() <= 2 * (unfused - exact).norm()


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_sink_for_each_query(codegen):
    def f(q, k, v, sinks):
        scores = (q @ k.mT * 0.3).masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), INF)
        return F.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1] @ v

    assert function_agrees(f, *qkv(2, 4), double(2, 4, 6, 1), codegen=codegen).counts[NAME] == 1


def test_weights_that_are_zeroed_where_the_scores_are_masked():
    """CPM-Ant; a row without any key, whose gradient the model makes NaN, is left out here."""

    def f(q, k, v, m):
        scores = (q @ k.mT).masked_fill(m == torch.tensor(False), INF)
        return F.softmax(scores, -1).masked_fill(m == torch.tensor(False), torch.scalar_tensor(0, dtype=q.dtype)) @ v

    assert function_agrees(f, *qkv(2, 4), keep() | torch.eye(6, dtype=torch.bool)).counts[NAME] == 1
    torch._dynamo.reset()
    report = function_agrees(
        lambda q, k, v, m: F.softmax((q @ k.mT).masked_fill(m, INF), -1).masked_fill(~m, 0) @ v,
        *qkv(2, 4),
        ~keep() & ~torch.eye(6, dtype=torch.bool),
    )
    assert report.counts[NAME] == 0 and "elsewhere than where the scores are masked" in report.skipped(NAME)[0].reason


def gpt(q, k, v, b):
    return F.softmax((q @ k.mT * 0.3) * b + -1e4 * (1 - b), -1) @ v


def test_scores_times_a_mask_that_the_graph_builds():
    """GPT: w * b + -1e4 * (1 - b)."""
    report = function_agrees(lambda q, k, v: gpt(q, k, v, torch.ones(6, 6, dtype=q.dtype).tril()), *qkv(2, 4))
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 1 and ", None, True, 0.3)" in run.after


@pytest.mark.parametrize("mask, reason", [
    # the first row sees no key at all
    (lambda: torch.ones(6, 6, dtype=torch.double).tril(-1), "no mask unless its zeros and ones are known"),
    (None, "no mask unless its zeros and ones are known"),
])  # fmt: skip
def test_scores_times_another_tensor_say_why(mask, reason):
    f = gpt if mask is None else lambda q, k, v: gpt(q, k, v, mask())
    report = function_agrees(f, *qkv(2, 4), *([torch.ones(6, 6, dtype=torch.double).tril()] if mask is None else []))
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("order", ["sum of both", "one by one", "the scores last"])
def test_biases_of_height_and_width_that_are_added_in_space(order):
    """SAM's and ViTDet's: the scores are viewed as [..., height, width, height, width] and back."""

    def attend(q, k, v, rows, columns):
        s = ((q * 0.5) @ k.transpose(-2, -1)).view(3, 2, 3, 2, 3)
        rows, columns = rows[..., :, None], columns[..., None, :]
        if order == "sum of both":
            s = s + rows + columns
        elif order == "one by one":
            s = s + rows
            s = s + columns
        else:
            s = columns + (rows + s)
        return s.view(3, 6, 6).softmax(-1) @ v

    q, k, v = (double(3, 6, 4) for _ in range(3))
    report = function_agrees(attend, q, k, v, double(3, 2, 3, 2), double(3, 2, 3, 3))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


@pytest.mark.parametrize("count", [5, 6])
def test_no_more_than_five_are_added_in_space(count):
    def attend(q, k, v, b):
        s = (q @ k.transpose(-2, -1)).view(3, 2, 3, 2, 3)
        for i in range(count):
            s = s + b[i]
        return s.view(3, 6, 6).softmax(-1) @ v

    report = function_agrees(attend, *(double(3, 6, 4) for _ in range(3)), double(count, 3, 2, 3, 2, 3))
    assert report.counts[NAME] == (count == 5)


def test_scores_that_are_viewed_otherwise_when_something_is_added_are_left():
    def attend(q, k, v, b):
        return ((q @ k.transpose(-2, -1)).view(3, 2, 3, 6).transpose(1, 2).reshape(3, 6, 6) + b).softmax(-1) @ v

    report = function_agrees(attend, *(double(3, 6, 4) for _ in range(3)), double(3, 6, 6))
    assert report.counts[NAME] == 0
