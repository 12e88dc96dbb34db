"""ALiBi keeps its slopes: no bias for every pair of tokens."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.compat import cpp
from tests.models import double, explain, function_agrees

NAME, SEQ, HEADS = "fusion.attention", 9, 4
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.double)


def triangle():
    return torch.ones(SEQ, SEQ, dtype=torch.bool).tril()


def apart():
    i = torch.arange(SEQ)
    return i[None, :] - i[:, None]


def added_to_a_mask(q, k, v):
    bias = SLOPES[:, None, None].to(q.dtype) * apart() + torch.zeros(SEQ, SEQ, dtype=q.dtype).masked_fill(
        ~triangle(), float("-inf")
    )
    return (q @ k.mT * 0.5 + bias).softmax(-1) @ v


def filled(q, k, v):
    bias = -SLOPES.view(1, HEADS, 1, 1) * apart().abs()
    return F.scaled_dot_product_attention(
        q, k, v, bias.masked_fill(torch.triu(torch.ones(SEQ, SEQ), 1).bool(), float("-inf")), scale=0.5
    )


def one_after_the_other(q, k, v):
    bias = SLOPES.reshape(HEADS, 1, 1) * -apart().abs().to(q.dtype)
    return (q @ k.mT * 0.5 + bias.unsqueeze(0)).masked_fill(~triangle(), float("-inf")).softmax(-1) @ v


def forward_and_back(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, (2 * apart()) * SLOPES[None, :, None, None], scale=0.5)


def pairs(f, *inputs):
    """Largest mask that ATen's attention is given in the lowered forward graph."""
    from mindspeed_fx.kernels.cpu import attention as kernels

    found, plain = [], kernels._additive
    kernels._additive = lambda mask, q: found.append(0 if mask is None else mask.numel()) or plain(mask, q)
    try:
        torch.compile(f, backend="mindspeed", options={"codegen": "eager"})(*inputs)
    finally:
        kernels._additive = plain
        torch._dynamo.reset()
    return max(found)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(f, id=f.__name__, marks=() if f is added_to_a_mask else pytest.mark.slow)
        for f in (added_to_a_mask, filled, one_after_the_other, forward_and_back)
    ],
)
def test_no_bias_for_pairs(form, monkeypatch):
    inputs = [double(2, HEADS, SEQ, 8) for _ in range(3)]
    report = function_agrees(form, *inputs)
    assert report.counts[NAME] == 1 and not report.skipped(NAME)
    assert pairs(form, *inputs) <= HEADS * SEQ
    if form is added_to_a_mask:
        monkeypatch.setattr(cpp, "problem", lambda: "no compiler, so that ATen's runs in float32 too")
        assert pairs(form, *(x.detach().float() for x in inputs)) <= HEADS * SEQ


def test_beside_padding_and_with_sinks_the_bias_stays_what_it_was():
    padding = torch.zeros(1, 1, 1, SEQ, dtype=torch.double)
    padding[..., -2:] = -1e9

    def padded(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, SLOPES[:, None, None] * apart() + padding, scale=0.5)

    def with_sinks(q, k, v, sinks):
        scores = (q @ k.mT * 0.5 + SLOPES[:, None, None] * apart()).masked_fill(~triangle(), float("-inf"))
        column = sinks.reshape(1, -1, 1, 1).expand(2, -1, SEQ, -1)
        return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v

    inputs = [double(2, HEADS, SEQ, 8) for _ in range(3)]
    assert function_agrees(padded, *inputs).counts[NAME] == 1
    assert function_agrees(with_sinks, *inputs, double(HEADS)).counts[NAME] == 1


@pytest.mark.slow
def test_looking_both_ways_and_narrow_types_keep_the_bias():
    def both_ways(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, -SLOPES[:, None, None].to(q.dtype) * apart().abs(), scale=0.5)

    inputs = [double(2, HEADS, SEQ, 8) for _ in range(3)]
    assert function_agrees(both_ways, *inputs).counts[NAME] == 1
    assert pairs(both_ways, *inputs) >= HEADS * SEQ * SEQ
    narrow = [x.detach().bfloat16() for x in inputs]
    assert (
        explain(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, SLOPES[:, None, None].bfloat16() * apart()), *narrow
        ).counts[NAME]
        == 1
    )


def test_a_number_that_is_added_leaves_the_weights_of_rows_that_are_hidden_whole():
    def f(q, k, v):
        i = torch.arange(SEQ)
        allowed = (i[:, None] // 5 != i // 5) & triangle()
        scores = q @ k.mT * 0.5 - SLOPES[:, None, None] * apart().abs()
        return (scores + torch.zeros_like(scores).masked_fill(~allowed, -10000.0)).softmax(-1) @ v

    report = function_agrees(f, *(double(2, HEADS, SEQ, 4) for _ in "qkv"), level=1)
    assert report.counts[NAME] == 1
