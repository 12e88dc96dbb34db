"""Models whose batch only data tell (``ids[keep]``, with Dynamo told to capture it): all that is fused otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="needs Hugging Face transformers")
from tests.models import double, function_agrees
from tests.zoo import architectures, table


class Kept(torch.nn.Module):
    """Trains on some of the sequences that it is given."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, keep, attention_mask):
        rows = input_ids[keep]
        return self.model(input_ids=rows, labels=rows, attention_mask=attention_mask[keep], use_cache=False)


# rotations and a mask of the batch; heads that broadcast; experts
@pytest.mark.parametrize("name", ["llama", "falcon", "mixtral"])
def test_a_batch_that_data_decide(name):
    model, _ = architectures.build(name, "sdpa")
    ids, keep = torch.randint(3, 100, (4, 16)), torch.tensor([True, False, True, True])
    with torch._dynamo.config.patch(**table.CAPTURE):
        inputs = dict(input_ids=ids, keep=keep, attention_mask=(ids > 20).long().index_fill_(1, torch.tensor(0), 1))
        row = table.check(name, Kept(model), inputs)
    assert row.graphs == 1 or torch.__version__ < "2.13"  # whose Dynamo asks for the size before the layers
    assert row.error < 1e-5
    assert row.sites["fusion.attention"] and dict(row.fused) == dict(row.sites), row.reasons


def test_a_sum_with_one_row_for_all_of_a_batch_that_data_decide():
    """Bart adds positions, [1, seq, hidden], before a norm: no addition of two alike, which only data could tell."""

    def add_norm(x, keep, positions, w):
        return F.rms_norm(x[keep] + positions, (8,), w, 1e-6)

    keep = torch.tensor([True, False, True])
    with torch._dynamo.config.patch(**table.CAPTURE):
        report = function_agrees(add_norm, double(3, 4, 8), keep, double(1, 4, 8), double(8))
    assert report.counts["fusion.rms_norm"] == 1 and report.counts["fusion.add_rms_norm"] == 0
    assert any("only data tell" in s.reason for s in report.skipped("fusion.add_rms_norm"))
