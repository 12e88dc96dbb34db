"""The gradients of a linear and a cross-entropy from saved logits, tile by tile."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import linear_cross_entropy_backward as file

operator = torch.ops.mindspeed.linear_cross_entropy_backward


def case(tokens, vocab, width, dtype=torch.float64, smoothing=0.0, bias=False, extra=False, ignored=0):
    """Arguments of the operator and what autograd gives for them."""
    hidden, weight = (torch.randn(n, width, dtype=dtype, requires_grad=True) for n in (tokens, vocab))
    b = torch.randn(vocab, dtype=dtype, requires_grad=True) if bias else None
    target = torch.randint(0, vocab, (tokens,))
    target[:ignored] = -100
    grad = torch.randn(tokens, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    logits = F.linear(hidden, weight, b)
    other = torch.randn(tokens, vocab, dtype=dtype) if extra else None
    loss = (F.cross_entropy(logits.to(grad.dtype), target, reduction="none", label_smoothing=smoothing) * grad).sum()
    if extra:
        loss = loss + (logits * other).sum()
    wanted = torch.autograd.grad(loss, [hidden, weight] + [b] * bias)
    lse = logits.detach().to(grad.dtype).logsumexp(-1)
    return (grad, logits.detach(), target, lse, other, hidden.detach(), weight.detach(), -100, smoothing), wanted


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(2, 60),
    st.integers(1, 9),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.sampled_from([(8 * 7 * 5, 7), (2**20, 4096), (8, 1)]),
)
def test_equals_autograd(tokens, vocab, width, smoothing, bias, extra, ignored, tiles):
    args, wanted = case(tokens, vocab, width, smoothing=smoothing, bias=bias, extra=extra, ignored=ignored)
    before = file.TILE, file.ROWS
    file.TILE, file.ROWS = tiles
    try:
        got = operator(*args, [True, True, bias])
    finally:
        file.TILE, file.ROWS = before
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert bias or got[2].numel() == 0


def test_bfloat16_is_as_near_as_unfused(monkeypatch):
    monkeypatch.setattr(file, "TILE", 4 * 32 * 16)
    torch.manual_seed(0)
    args, wanted = case(64, 48, 32)
    narrow = [
        a.bfloat16()
        if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() == 2
        else a.float()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    ]
    hidden, weight = (narrow[i].clone().requires_grad_() for i in (5, 6))
    narrow[1] = F.linear(hidden, weight).detach()
    narrow[3] = narrow[1].float().logsumexp(-1)
    loss = F.cross_entropy(F.linear(hidden, weight).float(), args[2], reduction="none")
    unfused = torch.autograd.grad(loss, [hidden, weight], narrow[0])
    for got, plain, exact in zip(operator(*narrow, [True, True, False]), unfused, wanted):
        assert got.dtype == torch.bfloat16
        assert (got.double() - exact).norm() <= 2 * (plain.double() - exact).norm()


@pytest.mark.parametrize("needed", [[True, False, False], [False, True, False], [False, False, True]])
def test_only_what_is_needed(needed):
    args, wanted = case(6, 9, 4, bias=True)
    for need, got, exact in zip(needed, operator(*args, needed), wanted):
        assert got.shape == (exact.shape if need else (0,))
        if need:
            torch.testing.assert_close(got, exact)


def test_schema_and_fake():
    args, _ = case(6, 9, 4, extra=True)
    torch.library.opcheck(operator.default, (*args, [True, True, True]), test_utils=("test_schema", "test_faketensor"))


def test_no_memory_of_the_size_of_the_logits():
    args, _ = case(256, 4096, 8, dtype=torch.float32)
    tile, file.TILE = file.TILE, 2**18
    try:
        with torch.profiler.profile(profile_memory=True) as profile:
            operator(*args, [True, True, False])
    finally:
        file.TILE = tile
    logits = 256 * 4096 * 4
    assert max(e.cpu_memory_usage for e in profile.key_averages()) < logits / 2
