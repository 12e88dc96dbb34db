"""The function in C++ that makes losses of logits and gradients in their place, by itself."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import linear_cross_entropy_work as work

pytestmark = pytest.mark.skipif(bool(cpp.problem()), reason=str(cpp.problem()))


def both(logits, target, upstream, smoothing, z_loss, softcap):
    """(losses, gradients) of the function, and in float64 by torch."""
    vocab = logits.shape[1]
    # With an identity for a weight, hidden states are logits.
    way = work.InCpp(logits, torch.eye(vocab), None, (smoothing, z_loss, softcap), True)
    made, losses, d = logits.clone(), torch.empty(len(logits)), torch.empty_like(logits)
    way.rows_of(made, d, target, upstream, losses)
    way.rows_of(again := logits.clone(), again, target, upstream, same := torch.empty(len(logits)))
    for a, b in ((again, d), (same, losses)):  # in place or not
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
    exact = logits.double().requires_grad_()
    capped = softcap * torch.tanh(exact / softcap) if softcap else exact
    want = (
        F.cross_entropy(capped, target, reduction="none", label_smoothing=smoothing)
        + z_loss * capped.logsumexp(-1) ** 2
    )
    (grad,) = torch.autograd.grad(
        want, exact, torch.ones(len(logits)).double() if upstream is None else upstream.double()
    )
    return (losses, d), (want.detach(), grad)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(1, 5),
    st.integers(1, 300),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 5.0]),
    st.sampled_from([0.1, 3.0, 60.0]),
)
def test_losses_and_gradients(rows, vocab, scaled, smoothing, z_loss, softcap, spread):
    torch.manual_seed(rows * vocab)
    logits, target = torch.randn(rows, vocab) * spread, torch.randint(0, vocab, (rows,))
    have, want = both(logits, target, torch.randn(rows) if scaled else None, smoothing, z_loss, softcap)
    for a, b in zip(have, want, strict=True):
        assert (a - b).abs().max() <= 2e-6 * max(1.0, float(b.abs().max()))


def test_classes_that_cannot_be():
    logits, target = torch.randn(2, 130), torch.tensor([3, 129])
    logits[:, 40:90] = float("-inf")
    (losses, d), (want, grad) = both(logits, target, None, 0.0, 0.0, 0.0)
    assert (
        torch.allclose(losses.double(), want) and torch.allclose(d.double(), grad, atol=1e-6) and not d[:, 40:90].any()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [0, 70, 129])
def test_what_is_no_number_stays_none(bad, at):
    logits = torch.randn(2, 130)
    logits[0, at] = bad
    (losses, d), (want, grad) = both(logits, torch.tensor([3, 3]), None, 0.0, 0.0, 0.0)
    assert (
        losses[0].isnan()
        and want[0].isnan()
        and d[0].isnan().any()
        and not losses[1].isnan()
        and not d[1].isnan().any()
    )


def test_chunks_hold_what_a_cache_holds_or_rows_enough():
    def rows(tokens, vocab):
        return work.InCpp(torch.empty(tokens, 1), torch.empty(vocab, 1), None, (0.0, 0.0, 0.0), True).rows

    assert rows(10**6, 1024) == work.CACHED // 4096
    assert rows(10**6, 32768) == work.ROWS
    assert rows(10**6, 128256) == work.CHUNK // (4 * 128256)
    assert rows(100, 32768) == 100 and rows(5, 2**28) == 1


def test_what_fits_a_block_of_onednn_needs_no_buffer(monkeypatch):
    monkeypatch.setattr(work.dispatcher, "onednn_beats_blas", lambda: True)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight = torch.zeros(4, 8, dtype=dtype), torch.zeros(6, 8, dtype=dtype)
        assert work.onednn(hidden, weight) is (dtype == torch.float32)
    assert not work.onednn(torch.zeros(4, 0), torch.zeros(6, 0))
    way = work.InCpp(torch.zeros(4, 8), torch.zeros(6, 8), None, (0.0, 0.0, 0.0), True)
    assert way.rows == way.block == 4 and way.logits is None
    monkeypatch.setattr(work, "BLOCK", 2 * 6 * 4)
    way = work.InCpp(torch.zeros(4, 8), torch.zeros(6, 8), None, (0.0, 0.0, 0.0), True)
    assert way.block == 2 < way.rows and len(way.logits) == way.rows
