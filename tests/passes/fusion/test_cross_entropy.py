import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import explain, function_agrees

NAME = "fusion.cross_entropy"
TARGET = torch.tensor([0, 3, -100, 6, 2])


def logits(dtype=torch.double):
    return torch.randn(5, 7).to(dtype).requires_grad_()


@settings(max_examples=16, deadline=None, derandomize=True)
@given(st.sampled_from(["none", "mean", "sum"]), st.sampled_from([0.0, 0.1]), st.sampled_from([-100, 3]), st.booleans())
def test_variants(reduction, smoothing, ignore, by_hand):
    torch._dynamo.reset()
    target = TARGET if ignore == -100 else TARGET.clamp_min(0)

    def f(x):
        if by_hand and not smoothing:
            return F.nll_loss(F.log_softmax(x, -1), target, reduction=reduction, ignore_index=ignore)
        return F.cross_entropy(x, target, reduction=reduction, label_smoothing=smoothing, ignore_index=ignore)

    assert function_agrees(f, logits()).counts[NAME] == 1


def test_no_float32_copy_of_half_precision_logits():
    def f(x):
        return F.cross_entropy(x.float().view(-1, 7), TARGET)

    x = torch.randn(1, 5, 7).bfloat16().requires_grad_()
    report = function_agrees(f, x, tolerance=2e-2)
    assert report.counts[NAME] == 1
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert "f32[1, 5, 7]" in run.before and "f32[1, 5, 7]" not in run.after and "f32[5, 7]" not in run.after


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda x: F.cross_entropy(x, TARGET, weight=torch.ones(7, dtype=x.dtype)), "class weights"),
        (lambda x: F.cross_entropy(x.softmax(-1), torch.ones(5, 7, dtype=x.dtype) / 7), "probabilities"),
        (lambda x: F.cross_entropy(x.view(1, 5, 7).transpose(1, 2), TARGET[None]), "3 dimensions"),
    ],
)  # fmt: skip
def test_near_misses_say_why(f, reason):
    report = function_agrees(f, logits())
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


def test_all_ignored_mean_is_nan_as_in_torch():
    x, target = logits(), torch.full((5,), -100)
    assert torch.compile(lambda x: F.cross_entropy(x, target), backend="mindspeed", options={"codegen": "eager"})(x).isnan()


def test_other_losses_are_left():
    assert explain(lambda x: F.nll_loss(x, TARGET), logits()).counts[NAME] == 0
