"""What plan a graph's collectives amount to."""

from __future__ import annotations

from collections import Counter

import pytest

from mindspeed_fx.passes.sharding import recognize
from mindspeed_fx.passes.sharding.recognize import Collective, amounts_to, described, per_layer


@pytest.mark.parametrize("counts, name", [
    ({"all_reduce": 2}, "tp"), ({"all_gather": 2, "reduce_scatter": 2}, "tp_sp"), ({"all_gather": 4, "reduce_scatter": 2}, "tp_sp"), ({"all_to_all": 4}, "ulysses"),
    ({"all_reduce": 2, "experts' all_to_all": 2}, "tp+ep"), ({"experts' all_to_all": 2}, "ep"), ({"all_reduce": 3}, ""), ({"all_gather": 1}, ""),
])  # fmt: skip
def test_names(counts, name):
    assert amounts_to(Counter(counts)) == name


def test_counts_per_layer_and_group(monkeypatch):
    monkeypatch.setattr(recognize.compat_distributed, "ranks_of", lambda group: [0, 1])
    layer = [Collective("all_reduce", "1", 2**20, f"decoder.layers.{i}.{m}") for i in range(3) for m in ("self_attention.linear_proj", "mlp.linear_fc2")]
    other = [Collective("all_to_all", "2", 2**20, f"decoder.layers.{i}.mlp.token_dispatcher") for i in range(3) for _ in range(2)]
    outer = [Collective("all_reduce", "1", 64, "embedding.word_embeddings")]
    assert per_layer(layer + other + outer) == {"1": (3, Counter(all_reduce=2)), "2": (3, Counter({"experts' all_to_all": 2}))}
    first, second, third = described(layer + other + outer, "forward")
    assert 'forward, 2 ranks of group 1: 2 all_reduce per layer (3 layers, 2 MiB each) amount to plan "tp"' in first
    assert 'amount to plan "ep"' in second and third == "forward, outside of layers: 1 all_reduce"
