"""Inputs that a forward writes and a checkpointed region reads."""

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
