import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import explain, function_agrees

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


CLASSES_SECOND = {
    "transposed": lambda x, t, **kw: F.cross_entropy(x.transpose(1, 2), t, **kw),
    "permuted": lambda x, t, **kw: F.cross_entropy(x.permute(0, 2, 1).to(x.dtype), t, label_smoothing=0.1, **kw),
    "by hand": lambda x, t, **kw: F.nll_loss(F.log_softmax(x, -1).transpose(1, 2), t, **kw),
    "by hand, second": lambda x, t, **kw: F.nll_loss(F.log_softmax(x.mT, 1), t, **kw),
    "as they come": lambda x, t, **kw: F.cross_entropy(x.view(2, 7, 4), t[:, :4], **kw),
}


@pytest.mark.parametrize("reduction", ["none", pytest.param("mean", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("transposed", "as they come") else pytest.mark.slow) for n in CLASSES_SECOND],
)
def test_classes_in_the_second_dimension(name, reduction):
    target = torch.tensor([[0, 3, -100, 6], [2, 2, 1, -100]])
    report = function_agrees(
        lambda x: CLASSES_SECOND[name](x, target, reduction=reduction),
        torch.randn(2, 4, 7, dtype=torch.double, requires_grad=True),
    )
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


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
        (lambda x: F.cross_entropy(x[0], TARGET[1]), "1 dimension"),
    ],
)  # fmt: skip
def test_near_misses_say_why(f, reason):
    report = function_agrees(f, logits())
    assert report.counts[NAME] == 0 and reason in report.skipped(NAME)[0].reason


def test_all_ignored_mean_is_nan_as_in_torch():
    x, target = logits(), torch.full((5,), -100)
    assert torch.compile(lambda x: F.cross_entropy(x, target), backend="mindspeed", options={"codegen": "eager"})(
        x
    ).isnan()


def test_other_losses_are_left():
    assert explain(lambda x: F.nll_loss(x, TARGET), logits()).counts[NAME] == 0


def _gathered(x, target, a, b, keep, total, minus):
    """a * (log-probability of the target) + b * (mean of all), in one of its spellings."""
    probs = x.log_softmax(-1)
    one, all_ = (
        probs.gather(-1, target.unsqueeze(-1)),
        (probs.sum(-1, keepdim=True) / x.shape[-1] if total else probs.mean(-1, keepdim=True)),
    )
    if not keep:
        one, all_ = one.squeeze(-1), all_.squeeze(-1)
    return a * one - (-b * all_) if minus else b * all_ + one * a


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.sampled_from([0.1, 0.3]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(5,), (2, 3)]),
    st.booleans(),
)
def test_label_smoothing_written_out(smoothing, keep, total, minus, shape, bare):
    torch._dynamo.reset()
    target = torch.randint(0, 7, shape)

    def f(x):
        if bare:
            return -x.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
        return -_gathered(x, target, 1 - smoothing, smoothing, keep, total, minus)

    report = function_agrees(f, torch.randn(*shape, 7, dtype=torch.double, requires_grad=True))
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


ROWS = torch.tensor([0, 3, 1, 6, 2])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: -x.log_softmax(-1)[torch.arange(5), ROWS].mean(),
        lambda x: (x.logsumexp(-1) - x.gather(1, ROWS.view(-1, 1)).squeeze(1)).mean(),
        pytest.param(
            lambda x: (x.gather(-1, ROWS[:, None]) - torch.logsumexp(x, -1, keepdim=True)).sum(), marks=pytest.mark.slow
        ),
        lambda x: (lambda p: 2 * (0.9 * -p.gather(1, ROWS[:, None])[:, 0] - p.sum(1) * (0.1 / 7)).mean())(
            x.log_softmax(1)
        ),
    ],
)
def test_picked_log_probabilities(f):
    report = function_agrees(f, logits())
    assert report.counts[NAME] == 1 and not report.skipped(NAME)


def test_picked_from_bfloat16_reads_no_float32_copy():
    def f(x):
        return -x.float().log_softmax(-1).gather(-1, ROWS[:, None]).mean()

    report = function_agrees(f, torch.randn(5, 7).bfloat16().requires_grad_(), tolerance=2e-2)
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 1 and "f32[5, 7]" not in run.after


@pytest.mark.parametrize(
    "f, reason",
    [
        (lambda p: (p.gather(-1, ROWS[:, None]) + p.exp()).sum(), "also read by exp"),
        (
            lambda p: p.gather(-1, ROWS[:, None]).sum() + p.mean(-1).square().sum(),
            "do not meet in a weighted sum after the same masks and sums",
        ),
        (
            lambda p: (p * torch.linspace(0, 1, 7, dtype=p.dtype)).sum(-1).mean(),
            "neither one-hot nor smoothed with numbers",
        ),
        (
            lambda p: F.kl_div(p, F.one_hot(ROWS, 7).to(p.dtype), reduction="batchmean"),
            "kl_div adds the entropy of its targets",
        ),
        (lambda p: p[:, ROWS].diagonal().mean(), "not (all rows, their targets)"),
        (lambda p: (2 * p.gather(-1, ROWS[:, None])[:, 0] - p.mean(-1)).sum(), "are no label smoothing"),
        (lambda p: (p.gather(-1, ROWS[:, None]) * p.gather(-1, 6 - ROWS[:, None])).sum(), "2 different"),
    ],
)
def test_written_out_but_not_fused(f, reason):
    def whole(x):
        return f(x.log_softmax(-1))

    report = function_agrees(whole, logits())
    assert report.counts.get(NAME, 0) == 0 and reason in report.skipped(NAME)[0].reason, report.skipped(NAME)


Z_LOSSES = {
    "mean": lambda x, t: F.cross_entropy(x, t) + 0.1 * (x.logsumexp(-1) ** 2).mean(),
    "smoothed": lambda x, t: (
        F.cross_entropy(x, t, label_smoothing=0.2) + 0.1 * torch.logsumexp(x, -1, keepdim=True).square().mean()
    ),
    "counted": lambda x, t: F.cross_entropy(x, t, reduction="sum") + (x.logsumexp(dim=-1).pow(2) * (t != -100)).sum(),
    "batched": lambda x, t: F.cross_entropy(x.view(-1, 7), t) + 0.1 * x.view(1, 5, 7).logsumexp(-1).pow(2).sum(),
    "written out": lambda x, t: (
        lambda z: (z - x.gather(-1, t.clamp_min(0)[:, None])[:, 0]).mean() + 0.1 * z.square().mean()
    )(x.logsumexp(-1)),
    "alone": lambda x, t: F.cross_entropy(x, t).detach() + x.logsumexp(-1).pow(2).sum(),
}


@pytest.mark.parametrize(
    "name",
    [
        "smoothed",
        "written out",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("mean", "counted", "batched", "alone")),
    ],
)
def test_a_z_loss_reads_the_logits_once(name):
    report = function_agrees(lambda x: Z_LOSSES[name](x, TARGET), logits())
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 2 and not report.skipped(NAME) and "aten.logsumexp" not in run.after


@pytest.mark.parametrize("name", ["mean", "counted"])
def test_a_z_loss_in_bfloat16(name):
    torch._dynamo.reset()
    report = function_agrees(
        lambda x: Z_LOSSES[name](x.float(), TARGET), torch.randn(5, 7).bfloat16().requires_grad_(), tolerance=2e-2
    )
    run = next(r for r in report.graphs[0].runs if r.report.name == NAME)
    assert report.counts[NAME] == 2 and "f32[5, 7]" not in run.after


def test_a_log_sum_exp_may_be_used_before_the_loss():
    def f(x, late):
        z = x.logsumexp(-1).square().mean()
        return z * F.cross_entropy(x, torch.where(z.detach() < 0, 0, TARGET) if late else TARGET)

    report = function_agrees(lambda x: f(x, False), logits())
    assert report.counts[NAME] == 2 and not report.skipped(NAME)
    report = function_agrees(lambda x: f(x, True), logits())  # the loss needs what came of it
    assert report.counts[NAME] == 1 and "compute the loss first" in report.skipped(NAME)[0].reason


def test_a_number_read_from_a_tensor_is_no_distribution_over_classes():
    """sum(x * number), as a loss scaled by a statistic has it."""

    def step(x):
        return (torch.tanh(x) * x.detach().sum().item()).sum()

    x = logits()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        loss = torch.compile(step, backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)(x)
    assert torch.equal(loss, step(x))
    (grad,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad(step(x), x)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=0)
