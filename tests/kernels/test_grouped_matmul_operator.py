"""Grouped matrix product: values and gradients against one product per group, every type, empty groups, any layout."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_fx.kernels.base import accumulation_dtype
from tests.models import double

ops = torch.ops.mindspeed
COUNTS = ([3, 0, 4], [0, 0, 0], [7, 0, 0], [0, 2, 3])


def offsets(counts, dtype=torch.int32):
    return torch.tensor(counts).cumsum(0).to(dtype)


def one_by_one(x, weight, counts):
    """The definition: each group of rows times its matrix; zero for rows after the last group."""
    parts = [rows @ w for rows, w in zip(x[: sum(counts)].split(counts), weight)]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - sum(counts), weight.shape[2])])


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_and_rules_of_custom_operators(counts, transposed):
    x, weight = double(7, 5), double(3, 4, 5) if transposed else double(3, 5, 4)
    f = lambda x, w: ops.grouped_matmul(x, w.transpose(1, 2) if transposed else w, offsets(counts))  # noqa: E731
    assert torch.autograd.gradcheck(f, (x, weight))
    view = (weight.transpose(1, 2) if transposed else weight).detach().requires_grad_()
    results = torch.library.opcheck(ops.grouped_matmul.default, (x, view, offsets(counts)), raise_exception=False)
    assert set(results.values()) == {"SUCCESS"}, results
    for needs in itertools.product((True, False), repeat=2):
        backward = (torch.randn(7, 4, dtype=torch.double), x.detach(), view.detach(), offsets(counts), *needs)
        results = torch.library.opcheck(ops.grouped_matmul_backward.default, backward, raise_exception=False)
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_values_in_every_type(counts, dtype, index):
    x, weight = torch.randn(7, 16).to(dtype), torch.randn(3, 16, 8).to(dtype)
    wide = accumulation_dtype(dtype)
    have = ops.grouped_matmul(x, weight, offsets(counts, index))
    assert have.dtype == dtype and have.is_contiguous()
    torch.testing.assert_close(
        have,
        one_by_one(x.to(wide), weight.to(wide), counts).to(dtype),
        rtol=2 * torch.finfo(dtype).eps,
        atol=20 * torch.finfo(dtype).eps,
    )


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_sizes(counts, rest, k, n, transposed, need_x, need_weight):
    x = torch.randn(sum(counts) + rest, k, dtype=torch.double, requires_grad=need_x)
    stored = torch.randn(
        len(counts), *((n, k) if transposed else (k, n)), dtype=torch.double, requires_grad=need_weight
    )
    weight = stored.transpose(1, 2) if transposed else stored
    have, want = ops.grouped_matmul(x, weight, offsets(counts)), one_by_one(x, weight, counts)
    torch.testing.assert_close(have, want)
    leaves = [t for t in (x, stored) if t.requires_grad]
    if leaves:
        grad = torch.randn_like(want)
        for a, b in zip(torch.autograd.grad(have, leaves, grad), torch.autograd.grad(want, leaves, grad), strict=True):
            torch.testing.assert_close(a, b)


def test_a_group_without_rows_has_a_zero_gradient_and_rows_without_a_group_too():
    x, weight = double(7, 5), double(3, 5, 4)
    ops.grouped_matmul(x, weight, offsets([3, 0, 2])).sum().backward()
    assert (
        weight.grad[1].eq(0).all() and weight.grad[0].ne(0).any() and x.grad[5:].eq(0).all() and x.grad[:5].ne(0).all()
    )


def test_only_the_gradient_that_is_needed_is_computed():
    x, weight = double(7, 5), double(3, 5, 4)
    for need_x, need_weight in ((True, False), (False, True), (True, True)):
        with FlopCounterMode(display=False) as counter:
            ops.grouped_matmul(
                x.detach().requires_grad_(need_x), weight.detach().requires_grad_(need_weight), offsets([3, 0, 4])
            ).sum().backward()
        assert counter.get_total_flops() == (1 + need_x + need_weight) * 2 * 7 * 5 * 4


def test_the_weight_gradient_is_stored_as_the_weight():
    weight = torch.randn(3, 4, 5).transpose(1, 2)
    _, dweight = ops.grouped_matmul_backward(
        torch.randn(7, 4), torch.randn(7, 5), weight, offsets([3, 0, 4]), False, True
    )
    assert dweight.stride() == weight.stride()
