"""The two halves of matmul that AOTAutograd splits on npu, against autograd, for every pair of ranks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_fx.compat import npu

SHAPES = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((6, 1, 2, 3), (5, 3, 4)),
    ((1, 5, 2, 3), (6, 1, 3, 4)),
    ((6, 5, 2, 3), (3, 4)),
]


def agree(a, b, mask):
    a, b = (x.requires_grad_() for x in (a, b))
    want = a @ b
    grad = torch.randn_like(want)
    expected = torch.autograd.grad(want, (a, b), grad)
    assert torch.allclose(npu.matmul(a.detach(), b.detach()), want)
    for needed, mine, theirs in zip(mask, npu.matmul_backward(grad, a.detach(), b.detach(), mask), expected):
        assert (mine is not None) == needed
        if needed:
            assert mine.shape == theirs.shape and torch.allclose(mine, theirs)


@pytest.mark.parametrize("mask", [[True, True], [True, False], [False, True]], ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_values_and_gradients(shapes, mask):
    agree(*(torch.randn(s, dtype=torch.float64) for s in shapes), mask)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.permutations([0, 1, 2]))
@settings(max_examples=20, deadline=None)
def test_any_strides(batch, m, k, order):
    a = torch.randn([[batch, m, k][d] for d in order], dtype=torch.float64).permute([order.index(d) for d in range(3)])
    agree(a, torch.randn(4, k, dtype=torch.float64).t(), [True, True])


def test_no_matmul_is_left_in_a_graph():
    """The proxy mode takes both entries, also for products inside one of them."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(a, b, grad):
        return torch.ops.aten.matmul_backward(grad, a, b, [True, True])

    gm = make_fx(f, decomposition_table=npu.decompositions())(
        torch.randn(5, 2, 3), torch.randn(3, 4), torch.randn(5, 2, 4)
    )
    assert not [n for n in gm.graph.nodes if "matmul" in str(n.target)] and [
        n for n in gm.graph.nodes if n.target is torch.ops.aten.mm.default
    ]
