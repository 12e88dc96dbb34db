"""Inputs that a forward writes and its backward, or a checkpointed region, depends on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mindspeed_fx.compat import dynamo


class Counting(nn.Module):
    """As a router of global balance: adds what it sees to a buffer, and divides by the buffer."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.register_buffer("counts", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def count(self, x):
        with torch.no_grad():
            self.counts += x.detach().softmax(-1).sum(0)
            self.steps += 1
        return ((x * self.weight).softmax(-1) * (self.counts / self.steps)).sum()

    def forward(self, x):
        return checkpoint(self.count, x, use_reentrant=False) if self.checkpointed else self.count(x)


def gradients(model: nn.Module, call) -> list[torch.Tensor]:
    """Of two forwards before the first backward."""
    parts = [x.requires_grad_() for x in torch.randn(2, 3, 4, dtype=torch.float64).unbind()]
    losses = [call(x) for x in parts]
    for loss in losses:
        loss.backward()
    return [model.weight.grad, model.counts, model.steps, *(x.grad for x in parts)]


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_second_forward_before_the_first_backward(codegen):
    """Autograd ended this with "modified by an inplace operation". Counted once, as without checkpointing."""
    undo = dynamo.allow_side_effects_under_checkpoint()
    try:
        torch.manual_seed(0)
        plain = Counting(False)
        expected = gradients(plain, plain)
        torch.manual_seed(0)
        model = Counting(True)
        results = gradients(
            model, torch.compile(model, backend="mindspeed", fullgraph=True, options={"codegen": codegen})
        )
    finally:
        undo()
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other)


def followed(x, w, b):
    """As quantization follows the greatest activation."""
    with torch.no_grad():
        b.mul_(0.9).add_(x.abs().max() * 0.1)
    scale = (b / 127).clamp(min=1e-8)
    return ((x @ w / scale).round() * scale - x @ w).detach() + (x @ w).tanh() * scale


def read_before(x, w, b):
    scale = torch.sigmoid(b) + 1
    with torch.no_grad():
        b.add_(1)
    return (x @ w).sin() * scale


def read_through_a_view(x, w, b):
    scale = b[1:].clone()
    with torch.no_grad():
        b[1:].mul_(0.5)
    return (x @ w)[:, 1:].sin() * scale.exp() * b[1:]


class Straight(torch.autograd.Function):
    """Graphs with one are traced by AOTAutograd alone."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


def in_a_function(x, w, b):
    with torch.no_grad():
        b.mul_(0.5)
    return Straight.apply(x @ w, b.exp())


FUNCTIONS = (followed, read_before, read_through_a_view, in_a_function)
OPTIONS = ({"codegen": "eager"}, {"codegen": "eager", "memory_budget": 0.5}, {}, {"memory_budget": 0.5})


CASES = [
    pytest.param(
        f,
        options,
        id=f"{f.__name__}-{options}",
        marks=() if "codegen" in options or (f, options) == (followed, {}) else pytest.mark.slow,
    )
    for f in FUNCTIONS
    for options in OPTIONS
]


@pytest.mark.parametrize("f, options", CASES)
def test_the_backward_of_a_forward_that_writes_an_input(f, options):
    """The backward made the factors again from what the forward had written, without an error."""

    def step(call):
        torch.manual_seed(0)
        x, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((16, 8), (8, 12)))
        b = torch.rand(12, dtype=torch.float64) + 0.5
        y = call(x, w, b)
        y.sum().backward()
        return y, x.grad, w.grad, b

    torch._dynamo.reset()
    for one, other in zip(step(torch.compile(f, backend="mindspeed", options=options)), step(f), strict=True):
        torch.testing.assert_close(one, other)
