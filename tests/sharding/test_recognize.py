"""What plan a graph's collectives amount to."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx, nn

from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.passes.sharding import recognize
from mindspeed_fx.passes.sharding.recognize import Collective, amounts_to, describe_collectives, per_layer
from mindspeed_fx.sharding.audit import alternatives


@pytest.mark.parametrize(
    "counts, name",
    [
        ({"all_reduce": 2}, "tp"),
        ({"all_gather": 2, "reduce_scatter": 2}, "tp_sp"),
        ({"all_gather": 4, "reduce_scatter": 2}, "tp_sp"),
        ({"all_to_all": 4}, "ulysses"),
        ({"all_reduce": 2, "experts' all_to_all": 2}, "tp+ep"),
        ({"experts' all_to_all": 2}, "ep"),
        ({"all_reduce": 3}, ""),
        ({"all_gather": 1}, ""),
    ],
)
def test_names(counts, name):
    assert amounts_to(Counter(counts)) == name


def test_counts_per_layer_and_group(monkeypatch):
    monkeypatch.setattr(recognize.distributed, "ranks_of", lambda group: [0, 1])
    layer = [
        Collective("all_reduce", "1", 2**20, f"decoder.layers.{i}.{m}")
        for i in range(3)
        for m in ("self_attention.linear_proj", "mlp.linear_fc2")
    ]
    other = [
        Collective("all_to_all", "2", 2**20, f"decoder.layers.{i}.mlp.token_dispatcher")
        for i in range(3)
        for _ in range(2)
    ]
    outer = [Collective("all_reduce", "1", 64, "embedding.word_embeddings")]
    assert per_layer(layer + other + outer) == {
        "1": (3, Counter(all_reduce=2)),
        "2": (3, Counter({"experts' all_to_all": 2})),
    }
    first, second, third = describe_collectives(layer + other + outer, "forward")
    assert 'forward, 2 ranks of group 1: 2 all_reduce per layer (3 layers, 2 MiB each) amount to plan "tp"' in first
    assert 'amount to plan "ep"' in second and third == "forward, outside of layers: 1 all_reduce"


def test_a_layer_whose_values_are_its_keys_is_read():
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("w")
    linear = graph.call_function(torch.ops.mindspeed.linear.default, (x, weight))
    sent = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (linear, "sum", "0"))
    out = graph.call_function(torch.ops.aten.scaled_dot_product_attention.default, (sent, linear, linear))
    graph.output(out)
    for node in graph.nodes:
        node.meta["val"] = torch.empty((8, 8) if node is weight else (1, 8, 8), device="meta")
        node.meta["nn_module_stack"] = {"layer": ("L['self'].layers.0.attention", nn.Module)}
    gm = fx.GraphModule({}, graph)
    layer = alternatives.layer_of(gm, {"layers.0.attention"}, 2, False, hardware("ascend910b2"))
    assert layer.queries == 2 * 8 * 8 * 4 and layer.keys == 2 * layer.queries


def test_rivals_are_priced():
    """Sequence parallelism sends as many bytes and does a part of the norms; where weights are small and activations
    large, dividing data is faster.
    """
    hw = hardware("ascend910b2")
    layer = alternatives.Layer(
        tokens=2**28, weights=2**26, states=2**29, queries=2**28, keys=2**27, between=1e-3, kept=2**29
    )
    found = {r.name: r for r in alternatives.alternative_plans(layer, 8, hw)}
    tp, sp = found["tp"], found["tp_sp"]
    assert (
        abs(tp.seconds - sp.seconds) < 0.1 * tp.seconds
        and sp.between == tp.between / 8
        and sp.memory == (layer.states + layer.kept) / 8 < tp.memory
    )
    assert found["zero2"].seconds == pytest.approx(
        sum(collective_seconds(k, 2**26, 8, hw) for k in ("all_gather", "reduce_scatter"))
    )
    lines = alternatives.describe_best("tp", alternatives.alternative_plans(layer, 8, hw), 8, hw)
    assert lines[1].startswith('mindspeed_fx.plan would do better over this group: "zero2" saves') and any(
        n.startswith('"tp_sp" wins') and "memory -" in n for n in lines
    )
    heavy = alternatives.Layer(
        tokens=2**20, weights=2**33, states=2**36, queries=2**20, keys=2**20, between=1e-6, kept=2**20
    )
    assert any(
        n.startswith('"zero2" loses') and "collectives +" in n
        for n in alternatives.describe_best("tp_sp", alternatives.alternative_plans(heavy, 8, hw), 8, hw)
    )
    assert alternatives.describe_best("ulysses", alternatives.alternative_plans(layer, 8, hw), 8, hw) == []
