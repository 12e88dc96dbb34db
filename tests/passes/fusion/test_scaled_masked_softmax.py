"""The softmax of attention whose weights are needed: one kernel on npu, as it is elsewhere."""

import pytest
import torch
from torch import nn

from tests.kernels.npu import npu_graphs
from tests.models import explain, function_agrees

NAME = "fusion.scaled_masked_softmax"
MASK = torch.ones(32, 32, dtype=torch.bool).triu(1)
PADDING = torch.zeros(2, 1, 1, 32, dtype=torch.bool)
PADDING[1, ..., 20:] = True


class Weights(nn.Module):
    """Attention that returns its weights, so that no kernel of attention can be used."""

    def __init__(self, spelling):
        super().__init__()
        self.qkv, self.spelling = nn.Linear(16, 48), spelling

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = self.spelling(q @ k.mT)
        return (weights @ v).sum() + (weights * torch.linspace(0, 1, 32, dtype=x.dtype)).sum()


SPELLINGS = {
    "fill": lambda s: (s * 0.5).masked_fill(MASK, float("-inf")).softmax(-1),
    "where": lambda s: torch.where(~MASK, s / 2, torch.finfo(s.dtype).min).softmax(-1),
    "padding": lambda s: s.masked_fill(PADDING, -10000.0).softmax(-1),
    "float32": lambda s: (s.float() * 0.5).masked_fill(MASK, -10000.0).softmax(-1).to(s.dtype),
    "float32 after": lambda s: (s * 0.5).masked_fill(MASK, -1e9).softmax(-1, dtype=torch.float32).to(s.dtype),
}


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("where", torch.float32),
        ("float32", torch.bfloat16),
        *(
            pytest.param(name, dtype, marks=pytest.mark.slow)
            for name in SPELLINGS
            for dtype in (torch.float32, torch.bfloat16)
            if (name, dtype) not in (("where", torch.float32), ("float32", torch.bfloat16))
        ),
    ],
)
def test_on_npu(name, dtype):
    graphs = npu_graphs.trains_alike(Weights(SPELLINGS[name]), torch.randn(2, 32, 16, requires_grad=True), dtype=dtype)
    assert (
        graphs.npu() == {"npu_scaled_masked_softmax": 1, "npu_scaled_masked_softmax_backward": 1}
        and graphs.unlowered() == []
    )


def test_elsewhere_only_where_it_is_named():
    def f(s):
        return (s * 0.5).masked_fill(MASK, float("-inf")).softmax(-1)

    s = torch.randn(2, 4, 32, 32, dtype=torch.double, requires_grad=True)
    report = explain(f, s)
    assert (
        report.counts.get(NAME, 0) == 0
        and 'put "fusion.scaled_masked_softmax" in enable' in report.skipped(NAME)[0].reason
    )
    torch._dynamo.reset()
    assert function_agrees(f, s, enable=[NAME]).counts[NAME] == 1


@pytest.mark.parametrize("later, own", [(-1e9, -5e4), (-5e4, -1e9), (-1e9, -1e9)])
def test_rows_that_two_masks_hide_whole(later, own):
    def f(s):
        return s.masked_fill(torch.ones(6, 6).triu(1).bool(), later).masked_fill(torch.eye(6).bool(), own).softmax(-1)

    assert not function_agrees(
        f, torch.randn(2, 4, 6, 6, dtype=torch.double, requires_grad=True), enable=[NAME]
    ).counts[NAME]


@pytest.mark.parametrize("f, size, reason", [
    (lambda s: s.masked_fill(MASK[:24, :24], -1e9).softmax(-1), 24, "rows is 24; valid: 32 to 4096"),
    (lambda s: s.masked_fill(MASK, -1e9).masked_fill(MASK.T, -1e9).softmax(-1), 32, "masked before, too"),
    (lambda s: (torch.where(MASK, s, -5e4) * 2).masked_fill(MASK.T, -1e9).softmax(-1), 32, "masked before, too"),
    (lambda s: (s + torch.full((32, 32), -1e9).triu(1)).masked_fill(MASK, -1e9).softmax(-1), 32, "masked before, too"),
    (lambda s: s.masked_fill(MASK, -5.0).softmax(-1), 32, None),
    (lambda s: s.softmax(-1), 32, None),
    (lambda s: s.masked_fill(MASK, -1e9).softmax(1), 32, None),
])  # fmt: skip
def test_left_as_it_is(f, size, reason):
    report = explain(f, torch.randn(2, 4, size, size, requires_grad=True), **npu_graphs.OPTIONS)
    assert report.counts.get(NAME, 0) == 0
    assert (reason in report.skipped(NAME)[0].reason) if reason else not report.skipped(NAME)
