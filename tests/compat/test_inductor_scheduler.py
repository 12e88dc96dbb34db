"""The order of loops in Inductor's code for the CPU."""

from __future__ import annotations

import functools

import pytest
import torch

import mindspeed_fx.kernels  # noqa: F401  registers the operators


def layer(x, weight, mask, table, at):
    for _ in range(3):
        x = (x.sin() * mask + x.cos() * table).exp().tanh() * (mask > 0.5).to(x.dtype)
    return (x + x[:, at].sum()) @ weight + mask


def loss(x, weights, mask, base, at):
    for weight in weights:
        x = layer(x, weight, mask.expand(16, 16), base.t(), at) + base[0, 0]
    return x.square().mean()


def test_a_loop_reads_what_was_written_before_it():
    """The gradient of an index is written into zeros, and added to a sum in a loop that is made anew to be fused."""
    torch.manual_seed(0)
    make = lambda *sizes: torch.rand(*sizes, dtype=torch.float64)  # noqa: E731
    inputs = make(16, 16), [make(16, 16) / 8 for _ in range(6)], make(1, 16), make(16, 16), torch.arange(4)
    leaves = [t.requires_grad_() for t in (*inputs[1], inputs[2], inputs[3])]
    expected = torch.autograd.grad(loss(*inputs), leaves)
    got = torch.autograd.grad(torch.compile(loss, backend="mindspeed", dynamic=False)(*inputs), leaves)
    torch.testing.assert_close(got, expected)


ROWS, COLUMNS = torch.tensor([0, 3, 3]), torch.tensor([1, 4])


def columns_then_mask(x, mask):
    x = x.clone()
    x[:, COLUMNS] = 0
    x[mask] = 1
    return x


def read_between(x, mask):
    x = x.clone()
    x[:, COLUMNS] = 0
    rows = x[ROWS]
    x[mask] = x.new_tensor(2.0)
    return x + rows.sum()


def sums_then_whole(x, mask):
    y = x * 2
    y.index_add_(0, ROWS, x[:3])
    kept = y.relu()
    y.masked_fill_(mask, 0)
    y[ROWS, COLUMNS[:1]] = 3
    y[mask.t()] = -1
    return y * kept


def gradient(x, mask):
    """Its backward writes columns of a gradient, reads rows of it and masks it."""
    y = (x * x.sin()).clone()
    y[mask] = 0
    y.index_add_(0, ROWS, x[:3])
    return y.index_copy_(1, COLUMNS, x[:, :2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("written", [columns_then_mask, read_between, sums_then_whole, gradient])
def test_elements_that_are_written_before_a_mask_is_filled(written, dtype):
    """What the first write had changed was lost: it went into the memory of the second."""
    torch.manual_seed(0)
    x, mask = torch.randn(16, 16).to(dtype).requires_grad_(), torch.randn(16, 16) > 0
    expected, got = written(x, mask), torch.compile(written, backend="mindspeed")(x, mask)
    both = zip((expected, *torch.autograd.grad(expected.sum(), x)), (got, *torch.autograd.grad(got.sum(), x)))
    for e, g in both:
        torch.testing.assert_close(g, e, **({"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}))


def over_the_largest(x, dim):
    """Of 32 numbers each, as operands of 8 bits are scaled."""
    blocks = x.unflatten(dim, (-1, 32))
    return (blocks / blocks.abs().amax(dim + 1, keepdim=True)).flatten(dim, dim + 1).bfloat16()


def test_loops_of_as_many_steps_need_not_be_split_alike():
    def f(grad, weight, x):
        multiply = functools.partial(torch.ops.mindspeed.narrow_product, dtype=torch.float32)
        by_rows, by_columns = (over_the_largest(grad, dim) for dim in (1, 0))
        return multiply(by_rows, over_the_largest(weight, 0)), multiply(by_columns.t(), x.bfloat16())

    args = torch.randn(64, 96), torch.randn(96, 64), torch.randn(64, 64)
    for have, want in zip(torch.compile(f, backend="mindspeed")(*args), f(*args)):
        torch.testing.assert_close(have, want, rtol=1e-2, atol=1e-2)
