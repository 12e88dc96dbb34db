"""vmap inside a graph: what stands around it is captured, what it computes stays."""

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan

from tests.models import double, explain, function_agrees


def swiglu(x, w):
    return torch.nn.functional.silu(x @ w) * x


def rows(x, w):
    return torch.func.vmap(lambda row: (row * w).sum(0).tanh())(x)


@pytest.mark.slow
def test_vmap_once_and_nested():
    def f(x, w):
        twice = torch.func.vmap(torch.func.vmap(lambda a: a * a.sin()))(rows(x, w))
        return swiglu(twice, w) * rows(x, w)

    assert function_agrees(f, double(3, 4, 4), double(4, 4), codegen="inductor").counts["fusion.swiglu"] == 1


def test_associative_scan_of_a_state_space_model():
    def f(x, a, w):
        _, states = associative_scan(
            lambda a, b: (b[0] * a[0], b[0] * a[1] + b[1]), (a.sigmoid(), x), dim=1, combine_mode="generic"
        )
        return swiglu(states, w)

    report = function_agrees(f, double(2, 5, 4), double(2, 5, 4), double(4, 4))
    assert report.counts["fusion.swiglu"] == 1 and report.graph_count == 1


@pytest.mark.slow
def test_vmap_in_a_checkpoint():
    def f(x, w):
        return torch.utils.checkpoint.checkpoint(lambda x: swiglu(rows(x, w), w), x, use_reentrant=False)

    assert function_agrees(f, double(3, 4, 4), double(4, 4)).counts["fusion.swiglu"] == 1


@pytest.mark.parametrize("f, reason", [
    (lambda x, w: torch.func.grad(lambda y: y.pow(3).sum())(x).detach() * swiglu(x, w), "is no vmap"),
])  # fmt: skip
def test_other_transforms_stay_and_say_so(f, reason):
    report = explain(f, double(4, 4), double(4, 4))
    assert report.counts["fusion.swiglu"] == 0 and reason in report.skipped("fusion.swiglu")[0].reason


def test_a_hessian_of_parameters_beside_a_gradient_is_captured():
    """jvp writes no parameter, though it has calls whose names end like those of writes."""

    def f(x, w):
        loss = lambda z: torch.nn.functional.silu(z @ w).square().sum()  # noqa: E731
        return torch.func.hessian(loss)(x[0]) * torch.func.grad(loss)(x).square().sum()

    function_agrees(f, double(3, 4), double(4, 4))
