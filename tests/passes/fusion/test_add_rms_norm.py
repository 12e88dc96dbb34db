import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import double, function_agrees

NAME = "fusion.add_rms_norm"


def norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-5)


@pytest.mark.parametrize("returned", ["both", "norm"])
def test_sum_and_norm(returned):
    def f(x, r, w):
        s = x + r
        return (norm(s, w), s) if returned == "both" else norm(s, w)

    assert function_agrees(f, double(2, 3, 8), double(2, 3, 8), double(8)).counts[NAME] == 1


def test_only_the_sum_has_a_gradient():
    def f(x, r, w):
        s = x + r
        return norm(s, w).detach(), s

    assert function_agrees(f, double(3, 8), double(3, 8), double(8)).counts[NAME] == 1


def test_two_norms_of_one_sum():
    def f(x, r, w):
        s = x + r
        return norm(s, w) * norm(s, 2 * w) + s

    assert function_agrees(f, double(3, 8), double(3, 8), double(8)).counts[NAME] == 1


def test_a_weight_made_after_the_sum():
    assert function_agrees(lambda x, r, w: norm(x + r, 1 + w), double(3, 8), double(3, 8), double(8)).counts[NAME] == 1
    torch._dynamo.reset()

    def f(x, r, w):
        s = x + r
        early = s.sin()
        return norm(s, early.sum() + w)

    report = function_agrees(f, double(3, 8), double(3, 8), double(8))
    assert report.counts[NAME] == 0 and "before the weight" in report.skipped(NAME)[0].reason


@pytest.mark.parametrize("f, reason", [
    (lambda x, r, w: norm(torch.add(x, r, alpha=2), w), "scaled by 2"),
    (lambda x, r, w: norm(x + r[:1], w), "differ in shape or type"),
    (lambda x, r, w: norm(x + r.float(), w), "differ in shape or type"),
])  # fmt: skip
def test_skips_say_why(f, reason):
    report = function_agrees(f, double(3, 8), double(3, 8), double(8))
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.sampled_from([torch.float64, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.sampled_from(["x", "residual", "weight", "none"]),
    st.booleans(),
)
def test_variants(dtype, weighted, frozen, chained):
    torch._dynamo.reset()
    x, r, w = (torch.randn(*s).to(dtype).requires_grad_() for s in ((2, 3, 8), (2, 3, 8), (8,)))
    for name, tensor in (("x", x), ("residual", r), ("weight", w)):
        tensor.requires_grad_(name != frozen)

    def f(x, r, w):
        s = r + x
        y = norm(s, w if weighted else None)
        return norm(s + y.tanh(), w) if chained else (y, s)

    tolerance = 1e-9 if dtype == torch.float64 else 16 * torch.finfo(dtype).eps
    assert function_agrees(f, x, r, w, tolerance=tolerance).counts[NAME] == (2 if chained else 1)


def test_generated_code_on_cpu_is_left_alone_unless_the_pass_is_named():
    def f(x, r, w):
        s = x + r
        return norm(s, w), s

    inputs = [
        torch.randn(3, 8, requires_grad=True),
        torch.randn(3, 8, requires_grad=True),
        torch.randn(8, requires_grad=True),
    ]
    report = function_agrees(f, *inputs, codegen="inductor", tolerance=1e-5)
    assert report.counts[NAME] == 0 and "Inductor generates" in report.skipped(NAME)[0].reason
    torch._dynamo.reset()
    assert function_agrees(f, *inputs, codegen="inductor", enable=[NAME], tolerance=1e-5).counts[NAME] == 1


def test_a_transposed_sum_and_a_weight_that_is_made_after_it():
    """The copy that gives the sum its layout stood before the operator that makes it."""

    def f(x, r, w):
        s = x.transpose(1, 2) + r
        return s + norm(s, 1 + w).tanh()

    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in ((2, 8, 3), (2, 3, 8), (8,))]
    assert function_agrees(f, *(x.requires_grad_() for x in inputs)).counts[NAME] == 1
