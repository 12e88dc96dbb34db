"""Our plans beside torch's knapsacks and Megatron's modes under one simulator (benchmarks/memory_rivals.py): faster at
every limit.
"""

import pytest
import torch

from tests.models import Llama, tokens

pytest.importorskip("scipy", reason="torch's ilp knapsack needs scipy")
from benchmarks import memory_rivals as rivals

BUDGETS = 5


class Keywords(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Llama(layers=1, vocab=256)

    def forward(self, ids, labels):
        return self.model(ids, labels)


@pytest.mark.slow
def test_faster_than_every_rival_at_every_limit_on_a_llama(monkeypatch):
    monkeypatch.setattr(rivals, "FRACTIONS", [0.3, 0.7])
    torch.manual_seed(0)
    ids, labels = tokens(4, 128, 256)
    case = rivals.of_model("llama", Keywords(), {"ids": ids, "labels": labels}, "cpu", 1)
    gaps = rivals.compare(case, BUDGETS)  # which raises where a rival beats the certificate
    assert set(gaps) == {"ours", "certified", "torch dp", "torch greedy", "torch ilp", "megatron"}
    for who, found in gaps.items():
        assert len(found) == BUDGETS and all(
            own <= other + 1e-3 for own, other in zip(gaps["certified" if who == "certified" else "ours"], found)
        ), (who, gaps)
    assert max(gaps["ours"]) < 0.1 and max(gaps["certified"]) < 0.03
    for who in set(gaps) - {"ours", "certified"}:
        assert any(other > own + 0.01 for own, other in zip(gaps["ours"], gaps[who])), (who, gaps)


@pytest.mark.parametrize("seed", range(4))
def test_never_slower_than_torchs_knapsacks_on_random_steps(seed):
    gaps = rivals.compare(rivals.of_random(seed, 11), BUDGETS)
    for who, found in gaps.items():
        assert all(own <= other + 1e-9 for own, other in zip(gaps["ours"], found)), (who, gaps)
