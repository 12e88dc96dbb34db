"""The indexer's choice and attention to chosen keys: values and gradients by formula, and how much is read."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mindspeed_fx.kernels  # noqa: F401
from mindspeed_fx.kernels import lightning_indexer

ops = torch.ops.mindspeed
BATCH, QUERIES, KEYS, HEADS, WIDTH, COUNT = 2, 9, 12, 3, 6, 5


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks in a row of queries, the last of them shorter."""
    monkeypatch.setattr(lightning_indexer, "BLOCK", 150)


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def late(queries=QUERIES, keys=KEYS):
    """Whether a key is behind a query; the last query sees all."""
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


def scores_by_formula(q, k, weights):
    products = torch.einsum("bshd,btd->bsht", q, k).relu()
    return torch.einsum("bsh,bsht->bst", weights, products).masked_fill(late(), float("-inf"))


@pytest.mark.parametrize("count", [COUNT, KEYS, 3 * KEYS])
def test_the_choice_and_its_gradient(count):
    torch.manual_seed(0)
    leaves = normal(BATCH, QUERIES, HEADS, WIDTH), normal(BATCH, KEYS, WIDTH), normal(BATCH, QUERIES, HEADS)
    scores, indices = ops.lightning_indexer(*leaves, count)
    assert indices.shape == scores.shape == (BATCH, QUERIES, count) and indices.dtype == torch.int32
    expected = scores_by_formula(*leaves)
    found = min(count, KEYS)
    torch.testing.assert_close(scores[..., :found], expected.topk(found, -1).values)
    assert (scores[..., found:] == float("-inf")).all()
    is_none = indices < 0
    assert torch.equal(is_none, scores == float("-inf"))
    assert (~is_none).sum(-1)[0].tolist() == [min(s + 1 + KEYS - QUERIES, count) for s in range(QUERIES)]
    there = expected.gather(-1, indices.clamp(min=0).long())
    torch.testing.assert_close(scores[~is_none], there[~is_none])
    towards = torch.randn_like(scores).masked_fill(is_none, 0)
    one = torch.autograd.grad(scores, leaves, towards)
    other = torch.autograd.grad((there.masked_fill(is_none, 0) * towards).sum(), leaves)
    for a, b in zip(one, other, strict=True):
        assert b.abs().max() > 0
        torch.testing.assert_close(a, b)


def attention_by_formula(q, k, v, indices, scale):
    """(out, lse, weights of all keys added up over heads)."""
    seen = torch.zeros(BATCH, QUERIES, KEYS, dtype=torch.bool)
    for b, s, c in (indices >= 0).nonzero().tolist():
        seen[b, s, indices[b, s, c]] = True
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = (torch.einsum("bshd,bthd->bsht", q, k) * scale).masked_fill(~seen.unsqueeze(2), float("-inf"))
    p = scores.softmax(-1)
    return torch.einsum("bsht,bthd->bshd", p, v), scores.logsumexp(-1), p.sum(2)


def choose():
    indices = torch.stack([torch.randperm(KEYS)[:COUNT] for _ in range(BATCH * QUERIES)]).view(BATCH, QUERIES, COUNT)
    indices[:, ::2, COUNT - 2 :] = -1
    return indices.to(torch.int32)


KINDS = {"absorbed": (1, None), "grouped": (2, 7), "a key a head": (4, 7)}
"""Heads of keys, width of values."""


@pytest.mark.parametrize("kind", KINDS)
def test_attention_and_its_gradient(kind):
    torch.manual_seed(0)
    kv_heads, v_width = KINDS[kind]
    q, k, indices = normal(BATCH, QUERIES, 4, WIDTH), normal(BATCH, KEYS, kv_heads, WIDTH), choose()
    v = None if v_width is None else normal(BATCH, KEYS, kv_heads, v_width)
    leaves = [q, k] if v is None else [q, k, v]
    v_width = v_width or WIDTH - 2
    out, lse = ops.sparse_attention(q, k, v, indices, 0.3, v_width)
    expected, sums, weights = attention_by_formula(q, k, k[..., :v_width] if v is None else v, indices, 0.3)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, sums)
    chosen = ops.chosen_weights(q.detach(), k.detach(), indices, lse.detach(), 0.3)
    there = weights.gather(-1, indices.clamp(min=0).long()).masked_fill(indices < 0, 0)
    torch.testing.assert_close(chosen, there)
    towards = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad(out, leaves, towards), torch.autograd.grad(expected, leaves, towards)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype):
    """Within the rounding of arguments and results: sums are made in float32."""
    torch.manual_seed(0)
    q, k, indices = normal(BATCH, QUERIES, 4, WIDTH, dtype=dtype), normal(BATCH, KEYS, 1, WIDTH, dtype=dtype), choose()
    (out, lse), eps = ops.sparse_attention(q, k, None, indices, 0.3, 4), torch.finfo(dtype).eps
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    expected, sums, _ = attention_by_formula(*wide, wide[1][..., :4], indices, 0.3)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=eps)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-5, atol=1e-5)
    towards = torch.randn_like(out)
    grads = torch.autograd.grad(out, [q, k], towards)
    for a, b in zip(grads, torch.autograd.grad(expected, wide, towards.double())):
        torch.testing.assert_close(a.double(), b, rtol=2 * eps, atol=4 * eps)
    weights = normal(BATCH, QUERIES, 4, dtype=dtype)
    scores = ops.lightning_indexer(q, k.squeeze(2), weights, COUNT)[0]
    exact = scores_by_formula(wide[0], wide[1].squeeze(2), weights.double()).topk(COUNT, -1).values
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_no_tensor_of_queries_times_keys(monkeypatch):
    """1,024 tokens, 16 chosen: forward and backward make nothing beyond a block or an argument, and the work that is
    counted is that of the chosen keys."""
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr(lightning_indexer, "BLOCK", 1 << 14)
    length, count = 1024, 16
    q, k = torch.randn(1, length, 2, 8), torch.randn(1, length, 1, 8)
    with Largest() as largest:
        scores, indices = ops.lightning_indexer(q, k.squeeze(2), q[..., 0], count)
        out, lse = ops.sparse_attention(q, k, None, indices, 1.0, 4)
        ops.chosen_weights(q, k, indices, lse, 1.0)
        ops.sparse_attention_backward(out, q, k, None, indices, out, lse, 1.0, 4)
        ops.lightning_indexer_backward(scores.nan_to_num(neginf=0), q, k.squeeze(2), q[..., 0], indices)
    assert largest.numbers <= max(q.numel(), length * count), largest.numbers
    with FlopCounterMode(display=False) as counter:
        ops.sparse_attention(q, k, None, indices, 1.0, 4)
    assert counter.get_total_flops() == 2 * 2 * length * count * (8 + 4)
