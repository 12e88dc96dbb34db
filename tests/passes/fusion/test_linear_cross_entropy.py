import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mindspeed_fx.compat import cpp
from mindspeed_fx.kernels import linear_cross_entropy as operators
from mindspeed_fx.passes.fusion import linear_cross_entropy as fusion
from tests.models import LLAMA_COUNTS, Llama, assert_same_training, explain, function_agrees, fusion_counts, tokens

NAME = "fusion.linear_cross_entropy"
TARGET = torch.tensor([[1, 2, -100, 0, 3, 4], [3, 3, 1, 0, -100, 6]])
FLAT = TARGET.view(-1)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(fusion, "SMALLEST", 0)
    monkeypatch.setattr(fusion, "SMALLEST_CPP", 0)


def inputs(dtype=torch.double):
    return tuple(torch.randn(*shape).to(dtype).requires_grad_() for shape in ((2, 6, 5), (7, 5), (7,)))


def flat(hidden, weight, bias=None, **kwargs):
    return F.cross_entropy(F.linear(hidden, weight, bias).view(-1, 7), FLAT, **kwargs)


def shifted(hidden, weight):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 7), TARGET[..., 1:].reshape(-1))


def sequence_first(hidden, weight):
    logits = torch.matmul(hidden, weight.t()).transpose(0, 1).contiguous()
    return F.cross_entropy(logits.view(-1, 7), TARGET.t().reshape(-1), reduction="none").view(6, 2).sum()


def capped(hidden, weight):
    logits = F.linear(hidden, weight) / 3.0
    return F.cross_entropy((torch.tanh(logits) * 3.0).view(-1, 7), FLAT)


def two_dimensional(hidden, weight, bias):
    return F.cross_entropy(torch.addmm(bias, hidden.view(-1, 5), weight.transpose(0, 1)), FLAT)


def untransposed(hidden, weight):
    return F.cross_entropy(hidden.view(-1, 5) @ weight.t().contiguous(), FLAT)


def by_hand(hidden, weight):
    return F.nll_loss(F.log_softmax(F.linear(hidden, weight), -1).view(-1, 7), FLAT)


def last_token(hidden, weight):
    return F.cross_entropy(F.linear(hidden, weight)[:, -1], TARGET[:, 0])


def mean_of_all(hidden, weight):
    return flat(hidden, weight, reduction="none").view(2, 6).mean()


@pytest.mark.parametrize(
    "f, reduction",
    [
        (flat, "mean"),
        (shifted, "mean"),
        (sequence_first, "sum"),
        (capped, "mean"),
        (two_dimensional, "mean"),
        (untransposed, "mean"),
        (last_token, "mean"),
        (mean_of_all, "sum"),
        (lambda h, w: flat(h, w, reduction="sum", label_smoothing=0.1), "sum"),
    ],
)
def test_spellings(f, reduction):
    hidden, weight, bias = inputs()
    report = function_agrees(f, hidden, weight, *([bias] if f in (flat, two_dimensional) else []))
    assert report.counts[NAME] == report.counts["fusion.cross_entropy"] == 1 and not report.skipped(NAME)
    after = next(run for run in report.graphs[0].runs if run.report.name == NAME).after
    assert (
        f"'{reduction}')" in after
        and "aten.linear" not in after
        and "matmul" not in after
        and "mindspeed.cross_entropy" not in after
    )


def logits_too(hidden, weight):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.float().view(-1, 7), FLAT), logits


def z_loss(hidden, weight):
    logits = F.linear(hidden, weight).view(-1, 7)
    return F.cross_entropy(logits, FLAT) + logits.logsumexp(-1).square().mean()


def classes_cut(hidden, weight):
    return F.cross_entropy(F.linear(hidden, torch.cat((weight, weight)))[..., ::2].reshape(-1, 7), FLAT)


def classes_moved(hidden, weight):
    return F.cross_entropy(F.linear(hidden, weight).view(-1, 7).t().reshape(-1, 7), FLAT)


def in_double(hidden, weight):
    return F.cross_entropy(F.linear(hidden, weight).double().view(-1, 7), FLAT)


def written(hidden, weight):
    weight = weight.detach() * 1.0
    loss = flat(hidden.detach(), weight)
    weight.view(-1).add_(1.0)
    return loss + weight.sum()


@pytest.mark.parametrize(
    "f, reason, dtype",
    [
        (logits_too, "returned by the compiled function; compile a function that returns only the loss", torch.float),
        (z_loss, "the log-sum-exp of the tokens is used too (a z-loss)", torch.double),
        (
            lambda h, w: F.cross_entropy(F.linear(h, w).relu().view(-1, 7), FLAT),
            "relu (aten.relu.default) stands between",
            torch.double,
        ),
        (
            lambda h, w: F.cross_entropy((F.linear(h, w) / 3).tanh().mul(2).add(w[:, 0]).view(-1, 7), FLAT),
            "a bias, or a scale that is no number, is applied after the soft-cap",
            torch.double,
        ),
        (
            lambda h, w: F.cross_entropy((F.linear(h, w, w[:, 0]) * h[..., :1]).view(-1, 7), FLAT),
            "the linear has a bias, which would be scaled token by token",
            torch.double,
        ),
        (
            lambda h, w: F.cross_entropy((F.linear(h, w) * w[:, 0]).view(-1, 7), FLAT),
            "mul (aten.mul.Tensor) stands between",
            torch.double,
        ),
        (classes_cut, "rearranges the classes", torch.double),
        (lambda h, w: flat(h, w, reduction="none"), "would take a fourth matrix product", torch.double),
        (
            lambda h, w: flat(h, w, reduction="none") * torch.arange(12),
            "would take a fourth matrix product",
            torch.double,
        ),
        (
            lambda h, w: F.cross_entropy(F.linear(h, w).view(-1, 7), FLAT, weight=torch.ones(7).double()),
            "fusion.cross_entropy, on whose result this pass builds",
            torch.double,
        ),
        (in_double, "of torch.float32 logits is computed in torch.float64", torch.float),
        (written, "is changed in place", torch.double),
    ],
)
def test_near_misses_say_why(f, reason, dtype):
    report = function_agrees(f, *inputs(dtype)[:2], tolerance=1e-5 if dtype == torch.float else 1e-9)
    assert report.counts[NAME] == 0
    (skipped,) = report.skipped(NAME)
    assert reason in skipped.reason


def test_losses_of_something_else_are_no_near_miss():
    for f in (lambda h, w: F.cross_entropy(h.view(-1, 5), FLAT % 5), lambda h, w: F.linear(h, w).sum()):
        report = explain(f, *inputs()[:2])
        assert report.counts[NAME] == 0 and not report.skipped(NAME)


def test_small_logits_stay_unless_the_pass_is_named(monkeypatch):
    monkeypatch.setattr(fusion, "SMALLEST", 2**20)
    report = function_agrees(flat, *inputs())
    assert report.counts[NAME] == 0 and "below 1 MiB the unfused form is faster" in report.skipped(NAME)[0].reason
    assert function_agrees(flat, *inputs(), enable=[NAME]).counts[NAME] == 1
    assert function_agrees(flat, *inputs(), enable=["fusion.*"]).counts[NAME] == 0


def test_the_kernel_in_cpp_pays_earlier(monkeypatch):
    monkeypatch.setattr(fusion, "SMALLEST", 2**20)
    assert function_agrees(flat, *inputs(torch.float)[:2], tolerance=1e-5).counts[NAME] == (cpp.problem() is None)
    monkeypatch.setattr(fusion, "in_cpp", lambda *_: "no compiler")
    assert function_agrees(flat, *inputs(torch.float)[:2], tolerance=1e-5).counts[NAME] == 0


def test_losses_of_tokens_when_the_pass_is_named_or_no_gradient_flows():
    def f(hidden, weight):
        return flat(hidden, weight, reduction="none", label_smoothing=0.1).view(2, 6)

    hidden, weight, _ = inputs()
    assert function_agrees(f, hidden, weight, enable=[NAME]).counts[NAME] == 1
    assert function_agrees(f, hidden.detach(), weight.detach()).counts[NAME] == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_under_no_grad_nothing_but_the_loss_is_computed(monkeypatch, reduction):
    needed, chunked = [], operators.run_in_chunks
    monkeypatch.setattr(operators, "run_in_chunks", lambda *args: needed.append(args[-1]) or chunked(*args))
    hidden, weight, _ = inputs()
    with torch.no_grad():
        compiled = torch.compile(flat, backend="mindspeed", options={"codegen": "eager"})
        torch.testing.assert_close(
            compiled(hidden, weight, reduction=reduction), flat(hidden, weight, reduction=reduction)
        )
    assert [any(n) for n in needed] == [False]


def test_autocast_casts_before_the_operator():
    def f(hidden, weight):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flat(hidden, weight)

    report = function_agrees(f, *inputs(torch.float)[:2], tolerance=2e-2)
    assert report.counts[NAME] == 1
    assert "bf16[7, 5]" in next(run for run in report.graphs[0].runs if run.report.name == NAME).after


def test_symbolic_sizes():
    def f(hidden, weight, target):
        logits = F.linear(hidden, weight)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1), reduction="none").mean()

    compiled = torch.compile(
        f,
        backend="mindspeed",
        dynamic=True,
        fullgraph=True,
        options={"codegen": "eager", "enable": [NAME], "strict": True},
    )
    for batch, seq in ((2, 6), (3, 4)):
        target = torch.randint(0, 7, (batch, seq))
        hidden, weight = torch.randn(batch, seq, 5).double().requires_grad_(), inputs()[1]
        have, want = compiled(hidden, weight, target), f(hidden, weight, target)
        for a, b in zip(
            (have, *torch.autograd.grad(have, (hidden, weight))),
            (want, *torch.autograd.grad(want, (hidden, weight))),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("frozen", [(), ("head.weight",), ("head.weight", "head.bias")])
@pytest.mark.parametrize("dtype, tolerance", [(torch.double, 1e-9), (torch.bfloat16, 4e-2)])
def test_a_step_of_training(dtype, tolerance, frozen):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

        def forward(self, ids, labels):
            logits = self.head(self.embed(ids)).float() if dtype == torch.bfloat16 else self.head(self.embed(ids))
            return F.cross_entropy(logits[:, :-1].reshape(-1, 7), labels[:, 1:].reshape(-1))

    model = Model().to(dtype)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    ids = torch.randint(0, 7, (2, 6))
    assert explain(copy.deepcopy(model), ids, TARGET).counts[NAME] == 1
    assert_same_training(model, ids, TARGET, tolerance=tolerance)


def test_llama_with_tied_and_untied_weights():
    model = Llama().double()
    assert_same_training(model, *tokens(), tolerance=1e-6)
    torch._dynamo.reset()
    assert fusion_counts(explain(model, *tokens())) == {**LLAMA_COUNTS, NAME: 1}
    torch._dynamo.reset()
    model.head.weight = model.embed.weight
    assert_same_training(model, *tokens(), tolerance=1e-6)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_any_loss(data):
    torch._dynamo.reset()
    dtype = data.draw(st.sampled_from([torch.double, torch.bfloat16]))
    hidden, weight, bias = inputs(dtype)
    target = torch.randint(0, 7, (12,))
    bias = bias if data.draw(st.booleans()) else None
    leaves = [x.requires_grad_(data.draw(st.booleans())) for x in (hidden, weight, bias) if x is not None]
    kwargs = {
        "reduction": data.draw(st.sampled_from(["mean", "sum"])),
        "ignore_index": data.draw(st.sampled_from([-100, 3])),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.1])),
    }

    def f(*given):
        return F.cross_entropy(
            F.linear(*given).view(-1, 7).float() if dtype == torch.bfloat16 else F.linear(*given).view(-1, 7),
            target,
            **kwargs,
        )

    assert function_agrees(f, *leaves, tolerance=4e-2 if dtype == torch.bfloat16 else 1e-9).counts[NAME] == 1
