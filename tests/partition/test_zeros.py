"""Zeros of forward-mode derivatives reach the backward as zeros."""

import torch
from torch.func import jacfwd, jacrev, vmap


def test_a_laplacian_trains():
    """Of a network at points, as networks that solve differential equations have it: loss and gradients."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    points = torch.randn(6, 2, dtype=torch.float64)

    def loss(x):
        hessian = vmap(jacfwd(jacrev(lambda p: net(p[None])[0, 0])))(x)
        return (hessian[:, 0, 0] + hessian[:, 1, 1]).pow(2).mean()

    def results(run):
        value = run(points)
        return [value, *torch.autograd.grad(value, [net[0].weight, net[0].bias, net[2].weight])]

    want, have = results(loss), results(torch.compile(loss, backend="mindspeed"))
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
