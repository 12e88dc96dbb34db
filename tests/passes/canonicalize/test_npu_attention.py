"""Version 1 of torch_npu's fusion attention, as users call it, becomes version 3, with its dropout and its packed
sequences.
"""

import pytest
import torch
from torch import nn

from mindspeed_fx.kernels.npu.emulation import registry
from tests.kernels.npu import npu_graphs

registry.define()
npu = torch.ops.npu


class Attention(nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.qkv, self.given = nn.Linear(16, 48, bias=False), given

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, 24)).split(8, -1)
        layout = self.given.get("layout", "BSND")
        return npu.npu_fusion_attention(
            q, k, v, 2, layout, scale=0.35, **{k: v for k, v in self.given.items() if k != "layout"}
        )[0].flatten(-2)


CASES = {
    "plain": ({}, (2, 6, 16)),
    "causal": ({"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1), "sparse_mode": 3}, (2, 6, 16)),
    "packed": ({"layout": "TND", "actual_seq_qlen": [2, 7, 12], "actual_seq_kvlen": [2, 7, 12]}, (12, 16)),
    "packed causal": (
        {
            "layout": "TND",
            "actual_seq_qlen": [5, 12],
            "actual_seq_kvlen": [5, 12],
            "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1),
            "sparse_mode": 3,
            "softmax_layout": "TND",
        },
        (12, 16),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_version_3_is_called_and_agrees(name):
    given, shape = CASES[name]
    graphs = npu_graphs.trains_alike(Attention(**given), torch.randn(shape, requires_grad=True))
    assert graphs.npu() == {"npu_fusion_attention_v3": 1, "npu_fusion_attention_grad_v3": 1}


def test_dropout_draws_one_mask_for_both_directions():
    """The gradient of a sum over v is the dropped weights themselves: what the forward dropped, the backward drops."""
    model = Attention(keep_prob=0.5)
    compiled = torch.compile(model, backend="mindspeed", fullgraph=True, options=npu_graphs.OPTIONS)
    x = torch.randn(1, 6, 16)
    direction, step = torch.randn_like(model.qkv.weight), 1e-3

    def loss(shift):
        torch.manual_seed(3)
        with torch.no_grad():
            model.qkv.weight.add_(direction, alpha=shift)
        out = compiled(x).square().sum()
        with torch.no_grad():
            model.qkv.weight.sub_(direction, alpha=shift)
        return out

    with npu_graphs.lowered() as graphs:
        loss(0.0).backward()
    assert graphs.npu() == {"npu_fusion_attention_v3": 1, "npu_fusion_attention_grad_v3": 1}
    slope = (loss(step) - loss(-step)).item() / (2 * step)
    assert abs(slope - (model.qkv.weight.grad * direction).sum().item()) < 1e-2 * abs(slope)


def test_what_version_3_does_not_take():
    from mindspeed_fx import explain

    report = explain(Attention(seed=7), torch.randn(2, 6, 16), options=npu_graphs.OPTIONS)
    assert report.counts.get("canonicalize.npu_attention", 0) == 0
    assert "seed is given, which version 3 does not take" in str(report.skipped("canonicalize.npu_attention"))
