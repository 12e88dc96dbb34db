import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, function_agrees

NAME = "fusion.glu"


def new_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "written": new_gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_two_linears(name):
    f = lambda x, g, u: ACTIVATIONS[name](F.linear(x, g)) * F.linear(x, u)  # noqa: E731
    assert function_agrees(f, double(2, 3, 8), double(6, 8), double(6, 8)).counts[NAME] == 1


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_one_linear_in_halves_uses_the_packed_form(name):
    def f(x, w):
        gate, up = F.linear(x, w).chunk(2, -1)
        return up * ACTIVATIONS[name](gate)

    report = function_agrees(f, double(3, 8), double(12, 8))
    assert report.counts[NAME] == 1
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert any("mindspeed.glu" in line and "None" in line for line in run.after.splitlines())


def test_a_gate_on_something_else_is_left_alone():
    report = function_agrees(
        lambda x, w, y: torch.sigmoid(F.linear(x, w)) * y, double(3, 8), double(8, 8), double(3, 8)
    )
    assert report.counts.get(NAME, 0) == 0
    torch._dynamo.reset()
    report = function_agrees(
        lambda x, w, y, v: F.relu(F.linear(x, w)) * F.linear(y, v),
        double(3, 8),
        double(8, 8),
        double(3, 8),
        double(8, 8),
    )
    assert report.counts.get(NAME, 0) == 0


@pytest.mark.parametrize(
    "relu, passes",
    [
        (lambda x: x.clamp(min=0), "all"),
        (lambda x: torch.maximum(x, torch.zeros_like(x)), "half"),
        (lambda x: torch.where(x > 0, x, 0.0), None),
    ],
)
def test_relu_by_another_name_has_the_same_gradient_or_stays(relu, passes):
    report = function_agrees(
        lambda x, g, u: relu(F.linear(x, g)) * F.linear(x, u), double(3, 8), double(6, 8), double(6, 8)
    )
    assert report.counts.get(NAME, 0) == (passes is None) and [
        f"{passes} of the gradient" in s.reason for s in report.skipped(NAME)
    ] == ([] if passes is None else [True])


def test_torchs_own_says_why_it_stays():
    report = function_agrees(lambda x, w: F.glu(F.linear(x, w)), double(3, 8), double(12, 8))
    assert report.counts.get(NAME, 0) == 0 and "one operator already" in report.skipped(NAME)[0].reason


def test_different_shapes_are_skipped_with_the_reason():
    report = function_agrees(
        lambda x, w, u: F.gelu(F.linear(x, w)) * F.linear(x, u), double(3, 8), double(6, 8), double(1, 8)
    )
    assert report.counts.get(NAME, 0) == 0 and "different shapes" in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    x, g, u = (torch.randn(*s).to(dtype).requires_grad_() for s in ((3, 8), (6, 8), (6, 8)))
    assert (
        function_agrees(lambda x, g, u: F.gelu(F.linear(x, g)) * F.linear(x, u), x, g, u, tolerance=3e-2).counts[NAME]
        == 1
    )


@settings(max_examples=5, deadline=None)
@given(st.sampled_from(sorted(ACTIVATIONS)), st.booleans(), st.booleans(), st.integers(1, 5), st.booleans())
def test_variants(name, up_first, frozen, width, bias):
    torch._dynamo.reset()
    x, g, u, b = double(2, 4), double(width, 4), double(width, 4), double(width)

    def f(x, g, u, b):
        gate, up = ACTIVATIONS[name](F.linear(x, g, b if bias else None)), F.linear(x, u)
        return up * gate if up_first else gate * up

    assert function_agrees(f, x, g.detach() if frozen else g, u, b if bias else b.detach()).counts[NAME] == 1
