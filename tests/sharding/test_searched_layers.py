"""Searched plans of models of useful sizes: weights with two names, layers whose attention is divided differently."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from mindspeed_fx.sharding.presets import ATTENTION
from tests.sharding.test_dispatch import checked


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, keys: int):
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.norm = nn.LayerNorm(width)
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, keys * self.size, bias=False) for _ in range(2))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            t.view(*x.shape[:2], n, self.size).transpose(1, 2)
            for t, n in ((self.q(y), self.heads), (self.k(y), self.keys), (self.v(y), self.keys))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(out.transpose(1, 2).reshape(x.shape))


class Tied(nn.Module):
    """Layers of ``keys`` heads of keys each, and one weight for both ends."""

    def __init__(self, vocab: int, width: int, heads: int, keys: tuple[int, ...]):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Attention(width, heads, n) for n in keys)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), (ids if labels is None else labels).flatten())


def searched(mesh, keys, labels=False):
    with torch.device("meta"):
        model, ids = Tied(32768, 4096, 16, keys).bfloat16(), torch.zeros(mesh.get("dp", 1), 8192, dtype=torch.long)
        args = (ids, ids.clone()) if labels else (ids,)
        plan = mindspeed_fx.plan(model, args, mesh=mesh, hardware="ascend910b2", keep=1)
    assert plan.unsupported == [] and plan.refused == {}
    return Plan.from_dict(plan.as_dict())


def runs(keys, mesh, plan):
    torch.manual_seed(0)
    result = checked(Tied(64, 16, 4, keys).double(), mesh, plan, torch.randint(0, 64, (4, 8)), bound=1e-9)
    assert not result.whole
    return result


def test_edges_of_a_tied_weight_are_of_the_module_that_reads_it():
    """The embedding's result is divided, and what the output layer, which is fused with the loss, reads is gathered."""
    plan = searched({"tp": 4}, (16, 16), labels=True)
    assert plan.modules["embed"] == Boundary(output={"tp": "S(1)"})
    assert plan.modules["head"] == Boundary(input={"tp": "R"})
    assert runs((4, 4), {"tp": 2}, plan).forward["all_gather_into_tensor"] > 0


def test_a_tied_weight_lies_as_the_plan_has_it_by_both_names():
    plan = searched({"dp": 2, "tp": 2}, (16, 16))
    assert plan.parameters["embed.weight"] == plan.parameters["head.weight"]
    runs((4, 4), {"dp": 2, "tp": 2}, plan)


def test_arguments_that_one_operator_reads_whole_and_another_in_parts():
    """Tokens are embedded in parts, and are the labels of whole logits."""
    plan = searched({"tp": 2}, (16, 16))
    assert plan.modules["embed"].input == {"tp": "S(1)"} and "tp" not in plan.inputs.get("ids", {})
    runs((4, 4), {"tp": 2}, plan)


def test_layers_divide_their_attention_differently():
    """Sixteen heads of keys by heads; one is gathered for parts of the queries, or taken inside."""
    plan = searched({"cp": 4}, (16, 1, 16))
    called = {pattern.partition("/")[0] for pattern in plan.operators}
    assert called == {"layers.0", "layers.1", "layers.2"}
    by_head = dict.fromkeys(("q|query", "k|key", "v|value"), {"cp": "S(1)"})
    for layer in (0, 2):
        assert plan.operators[f"layers.{layer}/{ATTENTION}"] == Boundary(output={"cp": "S(2)"}, arguments=by_head)
    assert plan.operators[f"layers.1/{ATTENTION}"].arguments["k|key"] == {"cp": "R"}
    assert runs((4, 1, 4), {"cp": 2}, plan).forward["all_to_all_single"] > 0


def test_a_module_that_is_not_there_is_named():
    edge = Boundary(output={"cp": "S(2)"})
    plan = Plan("mine", ("cp",), inputs={"*": {"cp": "S(1)"}}, operators={f"layer.0/{ATTENTION}": edge})
    with pytest.raises(ShardingError, match='names no module: "layer.0" .did you mean "layers.0"'):
        mindspeed_fx.simulate(Tied(64, 16, 4, (4,)), {"cp": 2}, plan, torch.zeros(2, 8, dtype=torch.long))
