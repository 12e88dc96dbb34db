"""``--init-model-with-meta-device``: modules whose weights had no memory make them anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mindspeed_fx.megatron import patches
from mindspeed_fx.megatron.training import meta_weights


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def garbage(module, *, device, recurse=True):
    return module._apply(lambda t: torch.full_like(t, float("nan"), device=device) if t.is_meta else t)


@pytest.fixture(autouse=True)
def fills_with_garbage(monkeypatch):
    monkeypatch.setattr(patches, "original", lambda target: garbage)


def test_norms_are_filled_and_what_has_memory_is_left():
    whole = nn.Linear(3, 3, bias=False)
    before = whole.weight.detach().clone()
    with torch.device("meta"):
        norm = nn.RMSNorm(3)
    model = meta_weights.to_empty_if_meta_device(nn.Sequential(whole, norm), device=torch.device("cpu"))
    assert torch.equal(model[1].weight, torch.ones(3)) and torch.equal(model[0].weight, before)


def test_what_nothing_fills_is_named():
    with torch.device("meta"):
        model = nn.Sequential(Bare())
    with pytest.raises(ValueError, match=r"0 \(Bare\) has no reset_parameters"):
        meta_weights.to_empty_if_meta_device(model, device=torch.device("cpu"))
