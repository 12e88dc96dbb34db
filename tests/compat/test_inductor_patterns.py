"""Rewrites of Inductor's own that gave another dtype than what they stand for."""

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
