"""What may stand between the last linear and the loss, and between the losses and their sum."""

import pytest
import torch
import torch.nn.functional as F

from mindspeed_fx.passes.fusion import linear_cross_entropy
from mindspeed_fx.passes.fusion.analysis import loss_head
from tests.models import function_agrees
from tests.passes.fusion.test_losses_written_out import fairseq

NAME = "fusion.linear_cross_entropy"
TARGET = torch.tensor([0, 3, 1, 6, 2, -100])
KEPT, ROWS = TARGET != -100, TARGET.clamp(min=0)


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(linear_cross_entropy, "SMALLEST", 0)
    monkeypatch.setattr(linear_cross_entropy, "SMALLEST_CPP", 0)


def loss(logits, target=TARGET, **kwargs):
    return F.cross_entropy(logits, target, **kwargs)


def picked(logits):
    return logits.log_softmax(-1).gather(1, ROWS[:, None]).squeeze(1)


def pairs(x):
    return x.view(2, 3, 5)


SPELLINGS = {
    "Granite": lambda x, w, b, one, each: loss(F.linear(x, w) / 8),
    "Cohere": lambda x, w, b, one, each: loss(F.linear(x, w) * 0.0625),
    "scaled and capped": lambda x, w, b, one, each: loss(3 * torch.tanh(F.linear(x, w) * 0.25 / 3)),
    "capped and scaled": lambda x, w, b, one, each: loss(3 * torch.tanh(F.linear(x, w) / 3) * -0.5),
    "another cap inside": lambda x, w, b, one, each: loss(3 * torch.tanh(F.linear(x, w) / 7)),
    "trained temperature": lambda x, w, b, one, each: loss(F.linear(x, w) * one.exp()),
    "by a trained temperature": lambda x, w, b, one, each: loss(F.linear(x, w) / one.view(1, 1)),
    "for each token": lambda x, w, b, one, each: loss(F.linear(x, w) / each),
    "bias afterwards": lambda x, w, b, one, each: loss(F.linear(x, w) + b),
    "scaled bias": lambda x, w, b, one, each: loss(F.linear(x, w, b) * one + b),
    "padded vocabulary": lambda x, w, b, one, each: loss(F.linear(x, torch.cat((w, w)), torch.cat((b, b)))[..., :7]),
    "nanochat": lambda x, w, b, one, each: loss(15 * torch.tanh(F.linear(x, torch.cat((w, w)))[..., :7] / 15)),
    "shifted": lambda x, w, b, one, each: loss((F.linear(pairs(x), w) * 0.25)[:, :-1].reshape(-1, 7), TARGET[:4]),
    "shifted log-probabilities": lambda x, w, b, one, each: (
        -F.linear(pairs(x), w).log_softmax(-1)[:, :-1].gather(-1, TARGET[:4].view(2, 2, 1)).mean()
    ),
    "picked": lambda x, w, b, one, each: -picked(F.linear(x, w)).mean(),
    "picked and masked": lambda x, w, b, one, each: -(picked(F.linear(x, w)) * KEPT).sum() / KEPT.sum(),
    "masked": lambda x, w, b, one, each: loss(F.linear(x, w), ROWS, reduction="none").masked_fill(~KEPT, 0).sum() / 5,
    "one-hot": lambda x, w, b, one, each: -(F.one_hot(ROWS, 7) * F.linear(x, w).log_softmax(-1)).sum(-1).mean(),
    "fairseq": lambda x, w, b, one, each: fairseq(F.linear(x, w), ROWS, ignored=0)[0],
}
INPUTS = ((6, 5), (7, 5), (7,), (1,), (6, 1))


def inputs():
    torch.manual_seed(3)
    return [
        torch.rand(*shape, dtype=torch.double).add(0.5 if shape[-1] == 1 else -0.5).requires_grad_() for shape in INPUTS
    ]


def test_every_spelling_in_one_graph():
    report = function_agrees(lambda *given: tuple(f(*given) for f in SPELLINGS.values()), *inputs())
    assert report.counts[NAME] == len(SPELLINGS) and not report.skipped(NAME)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling(name):
    assert function_agrees(SPELLINGS[name], *inputs()).counts[NAME] == 1


def test_a_mask_that_is_no_boolean_leaves_the_losses_apart():
    def f(x, w, b, one, mask):
        return (loss(F.linear(x, w), ROWS, reduction="none").view(6, 1) * mask.detach()).sum()

    report = function_agrees(f, *inputs())
    assert report.counts[NAME] == 0 and "fourth matrix product" in report.skipped(NAME)[0].reason


def test_bfloat16_is_as_close_as_the_unfused_loss():
    torch.manual_seed(1)
    wide = [torch.randn(*s, dtype=torch.double) for s in ((32, 64), (50, 64))]
    target = torch.randint(0, 50, (32,))

    def gradients(f, dtype):
        given = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in wide]
        return torch.cat([g.double().flatten() for g in torch.autograd.grad(f(*given), given)])

    def f(x, w):
        return (
            loss(F.linear(x, w).float() / 6, target) if x.dtype == torch.bfloat16 else loss(F.linear(x, w) / 6, target)
        )

    exact = gradients(f, torch.double)
    fused = gradients(
        torch.compile(f, backend="mindspeed", fullgraph=True, options={"codegen": "eager"}), torch.bfloat16
    )
    assert (fused - exact).norm() <= 2 * (gradients(f, torch.bfloat16) - exact).norm()


def test_a_scale_of_several_dimensions_becomes_a_vector():
    scale = torch.fx.Graph().placeholder("scale")
    for shape, is_view in (((), False), ((1,), False), ((1, 1), True), ((1, 1, 1), True)):
        scale.meta["val"] = torch.empty(shape)
        made = loss_head._single(lambda *call: call, scale)
        assert made == ((torch.ops.aten.reshape.default, scale, [1]) if is_view else scale)


@pytest.mark.parametrize("biased", [True, False])
def test_a_scale_that_is_another_number_in_every_call(biased):
    """A float argument is a symbol from its second value on."""

    def f(x, w, b, scale):
        return loss(F.linear(x, w, b if biased else None) * scale)

    torch._dynamo.reset()
    compiled = torch.compile(f, backend="mindspeed", options={"codegen": "eager"})
    for scale in (1.0, 0.5, 0.7):
        inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((6, 5), (7, 5), (7,))]
        results = []
        for call in (f, compiled):
            value = call(*inputs, scale)
            results.append((value, *torch.autograd.grad(value, inputs[: 2 + biased])))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)
