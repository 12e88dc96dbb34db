"""Gradients of convolutions in Inductor's code for the CPU: their operands are not stored anew in another order."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code

RESULT = re.compile(
    r"(\(\d+, \d+, \d+, \d+\)), (\([\d, ]*\)), (?:torch\.\w+, )?'torch.ops.aten.convolution_backward.default'"
)


class Block(nn.Module):
    """As ConvNeXt's: a depthwise convolution between values whose channels lie last, norm, MLP."""

    def __init__(self, channels: int = 16, groups: int = 16):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 7, padding=3, groups=groups)
        self.norm, self.up, self.down = nn.LayerNorm(channels), nn.Linear(channels, 32), nn.Linear(32, channels)

    def forward(self, x):
        h = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(h))).permute(0, 3, 1, 2)


class Rows(nn.Module):
    """Values in rows, of one dimension and of two."""

    def __init__(self):
        super().__init__()
        self.long, self.wide = nn.Conv1d(6, 8, 3, 2), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.wide(self.long(x).tanh().unflatten(-1, (7, 7))).square()


@pytest.mark.parametrize(
    "model, sizes, grouped",
    [
        (nn.Sequential(nn.Conv2d(3, 16, 2, 2), Block(), Block()), (2, 3, 14, 18), True),
        (nn.Sequential(nn.Conv2d(3, 16, 2, 2), Block(groups=1)), (2, 3, 14, 18), False),
        (Rows(), (2, 6, 99), False),
    ],
    ids=["depthwise", "channels last", "rows"],
)
def test_gradients_and_their_layout(model, sizes, grouped):
    x = torch.randn(sizes, requires_grad=True)
    eager = copy.deepcopy(model)
    eager(x).square().sum().backward()
    want, x.grad = x.grad, None
    with fresh_cache():
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="mindspeed")
        _, code = run_fw_bw_and_get_code(lambda: compiled(x).square().sum())
    torch.testing.assert_close(x.grad, want, rtol=1e-4, atol=1e-4)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3)
    strides = dict(RESULT.findall(code[-1]))
    assert not grouped or strides["(2, 16, 7, 9)"] == "(1008, 1, 144, 16)"
