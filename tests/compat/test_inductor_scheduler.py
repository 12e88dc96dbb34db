"""The order of loops in Inductor's code for the CPU."""

from __future__ import annotations

import torch


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
