"""Tokens sorted by expert and back: against the definition, gradients, the rules of custom operators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double

ops = torch.ops.mindspeed


@pytest.mark.parametrize("flat", [True, False])
def test_permute_is_a_stable_sort(flat):
    tokens, indices = torch.arange(12.0).view(4, 3), torch.tensor([[1, 0], [1, 2], [0, 1], [1, 0]])
    permuted, sorted_indices = ops.moe_permute(tokens, indices.reshape(-1) if flat else indices)
    assert permuted[:, 0].div(3).tolist() == [0, 2, 3, 0, 1, 2, 3, 1]
    assert sorted_indices.tolist() == [3, 0, 4, 7, 1, 5, 6, 2]
    assert torch.equal(permuted[sorted_indices], tokens.repeat_interleave(2, 0))


@pytest.mark.parametrize("k", [1, 3])
def test_gradients_and_rules_of_custom_operators(k):
    tokens, indices, probs = double(5, 4), torch.rand(5, 6).topk(k)[1], double(5, k)
    assert torch.autograd.gradcheck(lambda t: ops.moe_permute(t, indices)[0], (tokens,))
    rows, sorted_indices = double(5 * k, 4), ops.moe_permute(tokens, indices)[1]
    assert torch.autograd.gradcheck(lambda r, p: ops.moe_unpermute(r, sorted_indices, p), (rows, probs))
    assert torch.autograd.gradcheck(lambda r: ops.moe_unpermute(r, sorted_indices, None, k), (rows,))
    cases = [
        (ops.moe_permute.default, (tokens, indices)),
        (ops.moe_permute_backward.default, (rows.detach(), sorted_indices, 5)),
        (ops.moe_unpermute.default, (rows, sorted_indices, probs)),
        (ops.moe_unpermute.default, (rows, sorted_indices, None, k)),
        (ops.moe_unpermute_backward.default, (tokens.detach(), rows.detach(), sorted_indices, probs.detach(), k)),
        (ops.moe_unpermute_backward.default, (tokens.detach(), rows.detach(), sorted_indices, None, k)),
    ]
    for op, args in cases:
        results = torch.library.opcheck(op, args, raise_exception=False)
        assert set(results.values()) == {"SUCCESS"}, (op, results)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6), st.integers(1, 3), st.integers(3, 6), st.integers(0, 99))
def test_there_and_back(tokens, k, experts, seed):
    torch.manual_seed(seed)
    x, probs = torch.randn(tokens, 4, dtype=torch.double), torch.rand(tokens, k, dtype=torch.double)
    indices = torch.rand(tokens, experts).topk(k)[1]
    permuted, sorted_indices = ops.moe_permute(x, indices)
    torch.testing.assert_close(ops.moe_unpermute(permuted, sorted_indices, probs), x * probs.sum(1, keepdim=True))
    torch.testing.assert_close(ops.moe_unpermute(permuted, sorted_indices, None, k), x * k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tokens_are_summed_in_float32(dtype):
    rows, probs = torch.randn(32, 8).to(dtype), torch.rand(8, 4)
    sorted_indices = torch.randperm(32)
    exact = (rows.double()[sorted_indices].view(8, 4, 8) * probs.double().unsqueeze(-1)).sum(1)
    both, narrow = (
        ops.moe_unpermute(rows, sorted_indices, probs),
        ops.moe_unpermute(rows, sorted_indices, probs.to(dtype)),
    )
    assert both.dtype == torch.float32 and narrow.dtype == dtype
    torch.testing.assert_close(both.double(), exact, rtol=1e-5, atol=1e-5)
    exact = (rows.double()[sorted_indices].view(8, 4, 8) * probs.to(dtype).double().unsqueeze(-1)).sum(1)
    assert ((narrow.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("k", [1, 3])
def test_a_routing_map(k):
    """As Megatron's: tokens expert by expert, the probability of each, and the way back by the operator that lists have
    too.
    """
    tokens, probs, marked = double(5, 4), double(5, 6), torch.rand(5, 6).argsort(-1) < k
    permuted, share, places = ops.moe_permute_map(tokens, marked, probs, k)
    expert, token = marked.t().nonzero(as_tuple=True)
    assert torch.equal(permuted, tokens[token]) and torch.equal(share, probs[token, expert])
    assert torch.equal(permuted[places], tokens.repeat_interleave(k, 0))
    torch.testing.assert_close(
        ops.moe_unpermute(permuted * share[:, None], places, None, k), tokens * (probs * marked).sum(1, keepdim=True)
    )
    assert torch.autograd.gradcheck(lambda t, p: ops.moe_permute_map(t, marked, p, k)[:2], (tokens, probs))
    for op, args in (
        (ops.moe_permute_map.default, (tokens, marked, probs, k)),
        (ops.moe_permute_map_backward.default, (permuted.detach(), share.detach(), places, marked, k)),
    ):
        assert set(torch.library.opcheck(op, args, raise_exception=False).values()) == {"SUCCESS"}


def test_a_routing_map_without_tokens():
    permuted, share, places = ops.moe_permute_map(
        torch.empty(0, 4), torch.empty(0, 3, dtype=torch.bool), torch.empty(0, 3), 2
    )
    assert permuted.shape == (0, 4) and share.shape == places.shape == (0,)


def test_gradients_of_shares_are_contiguous_whatever_the_map():
    chosen = torch.tensor([[1, 0, 1], [0, 1, 1]], dtype=torch.bool)
    places = ops.moe_permute_map(torch.randn(2, 4), chosen, torch.rand(2, 3), 2)[2]
    for routing_map in (chosen, chosen.t().contiguous().t()):
        shares = ops.moe_permute_map_backward(torch.randn(4, 4), torch.ones(4), places, routing_map, 2)[1]
        assert shares.is_contiguous() and torch.equal(shares, chosen.float())
