"""Rewrites of Inductor's own that gave another dtype, or other values, than what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters


@pytest.mark.parametrize(
    "of, dtype",
    [(torch.bool, torch.float32), (torch.int64, torch.int32), (torch.float32, torch.float64), (torch.bool, None)],
)
def test_running_sum_of_a_constant_has_its_dtype(of, dtype):
    def positions(x):
        return torch.full((2, 4), 1, dtype=of).cumsum(1, dtype=dtype), x + 1

    x = torch.zeros(3)
    got = torch.compile(positions, backend="mindspeed")(x)
    torch.testing.assert_close(got, positions(x), rtol=0, atol=0, check_dtype=True)


def test_running_sum_that_a_backward_reads():
    """EdgeNeXt's positions: the backward read as float32 what the forward had saved as int64."""

    def project(weight):
        steps = torch.ones((4, 8, 8), dtype=torch.bool).cumsum(1, dtype=torch.float32)
        angles = (steps / (steps[:, -1:] + 1e-6))[..., None] / 10.0 ** torch.arange(16)
        return angles.sin() @ weight

    weight = torch.randn(16, 3, requires_grad=True)
    (expected,) = torch.autograd.grad(project(weight).square().sum(), weight)
    (got,) = torch.autograd.grad(torch.compile(project, backend="mindspeed")(weight).square().sum(), weight)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dtype, rewrites", [(None, 1), (torch.float32, 1), (torch.float64, 0)])
def test_running_sum_of_a_constant_is_counted_where_that_is_the_same(dtype, rewrites):
    def positions(x):
        return x + torch.ones(2, 4).cumsum(1, dtype=dtype)

    counters["inductor"].clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(positions, backend="mindspeed")(torch.zeros(2, 4))
    assert counters["inductor"]["pattern_matcher_count"] == rewrites


SUMS = {
    "product added": lambda x, a, b: x.add(a @ b, alpha=0.1),
    "added to a product": lambda x, a, b: (a @ b).add(x, alpha=-3),
    "one row": lambda x, a, b: x[0].mul(0.9).add(a @ b, alpha=0.1),
    "in place": lambda x, a, b: x.clone().add_(a @ b, alpha=0.1),
    "subtracted": lambda x, a, b: x.sub(a @ b, alpha=0.5),
    "factor of one": lambda x, a, b: x.add(a @ b, alpha=1),
    "softmax by hand": lambda x, a, b: torch.exp((x * 2).sub((x * 2).amax(1, keepdim=True), alpha=0.5)),
    "rounded quotient": lambda x, a, b: torch.div(a @ b, x, rounding_mode="floor"),
}


@pytest.mark.parametrize("sums", SUMS.values(), ids=list(SUMS))
def test_factors_of_sums(sums):
    """``add(x, mm(a, b), alpha=0.1)`` was taken for addmm(x, a, b)."""
    torch.manual_seed(0)
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((12, 8), (12, 10), (10, 8))]
    expected, got = sums(*leaves), torch.compile(sums, backend="mindspeed")(*leaves)
    torch.testing.assert_close(got, expected)
    if expected.grad_fn is not None:
        wanted, found = (torch.autograd.grad(y.square().sum(), leaves, allow_unused=True) for y in (expected, got))
        torch.testing.assert_close(found, wanted)


def test_a_factor_of_one_is_still_one_call():
    def added(x, a, b):
        return x.add(a @ b, alpha=1)

    counters["inductor"].clear()
    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(added, backend="mindspeed")(torch.randn(12, 8), torch.randn(12, 10), torch.randn(10, 8))
    assert counters["inductor"]["pattern_matcher_count"] >= 1


def beside_a_detached(x):
    y = x.sin().clone()
    z = y.detach()
    z.sigmoid_()
    return z, y + torch.zeros(()), x.cos()


RESULTS = {
    "input": lambda x: (x * torch.ones(()),),
    "input and a number": lambda x: (x * 1.0, x + 0, x - 0.0, x / 1),
    "beside its operand": lambda x: (y := x.sin(), y - torch.zeros(())),
    "beside another": lambda x: (y := x.sin(), y * torch.ones(()), y + torch.zeros(())),
    "twice": lambda x: (y := x.sin() * torch.ones(()), y),
    "beside a detached one": beside_a_detached,
}


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("function", RESULTS.values(), ids=list(RESULTS))
def test_results_share_memory_where_they_do_in_eager_mode(function, needs_gradient):
    """What is left out, since it adds zeros or multiplies by ones, leaves a copy."""
    told = []
    for run in (function, torch.compile(function, backend="mindspeed", fullgraph=True)):
        x = torch.linspace(1, 2, 4).requires_grad_(needs_gradient)
        results = run(x)
        shared = [[a.data_ptr() == b.data_ptr() for b in (x, *results)] for a in results]
        values = [r.detach().clone() for r in results]
        if needs_gradient:
            sum((r * (n + 2)).sum() for n, r in enumerate(results) if r.requires_grad).backward()
        told.append((shared, [r.requires_grad for r in results], values, x.grad))
    assert told[0][:2] == told[1][:2]
    torch.testing.assert_close(told[1][2:], told[0][2:])
