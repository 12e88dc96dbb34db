"""Sizes that ranks cannot share evenly: padded, with the price of it, or whole and named, under every named plan, and
all else as on one device; refused by module or tensor, size and mesh dimension where the plan is strict.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.presets import named_plan, whole_layers
from tests.sharding.llama import Llama
from tests.sharding.mixtral import Mixtral
from tests.sharding.test_any_model import equal

HEADS = dict(hidden=24, heads=3, kv_heads=3)


def evenly(what, dim, size, ranks, over):
    return rf"{what}.* dimension {dim} has {size} elements, which {ranks} ranks of {over} cannot share evenly"


CASES = [
    (
        "tp",
        {"tp": 2},
        HEADS,
        (4, 16),
        r'module "layers.0.attention".* divided along dimension 2 over 2 ranks of "tp", '
        r"which cannot share it evenly as \(4, 16, 3, 8\)",
    ),
    ("tp", {"tp": 2}, dict(vocab=63), (4, 16), evenly('parameter "embed.weight"', 0, 63, 2, '"tp"')),
    ("tp_sp", {"tp": 2}, {}, (4, 15), evenly('module "embed"', 1, 15, 2, '"tp"')),
    (
        "tp_2d",
        {"tp_x": 2, "tp_y": 2},
        HEADS,
        (4, 16),
        r'module "layers.0.attention".* over 2 ranks of "tp_x".* which cannot share it evenly as',
    ),
    ("ulysses", {"cp": 2}, HEADS, (4, 16), evenly('module "layers.0.attention"', 1, 3, 2, '"cp"')),
    ("kv_allgather", {"cp": 2}, {}, (4, 15), evenly('input "ids"', 1, 15, 2, '"cp"')),
    (
        "ring",
        {"cp": 2},
        {},
        (4, 14),
        r'module "layers.0.attention".*14 elements do not divide into 4, for 2 ranks of "cp"',
    ),
    (
        "hybrid",
        {"cp_ring": 2, "cp_ulysses": 2},
        {},
        (4, 14),
        evenly('input "ids"', 1, 14, 4, '"cp_ring", "cp_ulysses"'),
    ),
    ("zero1", {"dp": 2}, {}, (3, 16), evenly('input "ids"', 0, 3, 2, '"dp"')),
    (
        "zero2",
        {"dp": 2},
        dict(ffn=63),
        (4, 16),
        evenly('parameter "layers.0.mlp.gate_proj.weight"', 0, 63, 2, '"dp"'),
    ),
    (
        "zero3",
        {"dp": 2},
        dict(ffn=63),
        (4, 16),
        evenly('parameter "layers.0.mlp.gate_proj.weight"', 0, 63, 2, '"dp"'),
    ),
    ("ep", {"ep": 2}, dict(experts=3), (4, 16), evenly('parameter "layers.0.mlp.experts.gate"', 0, 3, 2, '"ep"')),
    ("ep_alltoall", {"ep": 2}, dict(experts=3), (3, 16), evenly("", 0, 3, 2, '"ep"')),
]


def build(plan, sizes):
    return (Mixtral if plan.startswith("ep") else Llama)(1, **sizes).double()


@pytest.mark.parametrize("plan,mesh,sizes,batch,says", CASES)
def test_uneven_sizes_are_refused_by_strict_plans(plan, mesh, sizes, batch, says):
    model = build(plan, sizes)
    with pytest.raises(ShardingError, match=says):
        strict = named_plan(plan, model, strict=True)
        simulate(model, mesh, strict, *(torch.randint(0, 60, batch) for _ in range(2)))


QUICK = ("tp", "ulysses", "ring", "zero2", "ep")


@pytest.mark.parametrize(
    "plan,mesh,sizes,batch",
    [pytest.param(*case[:4], marks=() if case[0] in QUICK else pytest.mark.slow) for case in CASES],
)
def test_uneven_sizes_are_padded_and_priced(plan, mesh, sizes, batch):
    model = build(plan, sizes)
    ids, labels = (torch.randint(0, 60, batch) for _ in range(2))
    result = equal(model, mesh, plan, ids, labels)
    # What is gathered before use is divided along another dimension.
    assert bool(result.padded) == (plan not in ("zero2", "zero3"))
    assert all(re.search(r"\d+ elements padded to \d+ for \d ranks of .*\(\+[\d.]+%\)", text) for text in result.padded)
    if plan not in ("tp_2d", "ep"):
        assert result.whole == []


@pytest.mark.parametrize(
    "plan,mesh,sizes,batch,says",
    [
        ("tp", {"tp": 4}, dict(vocab=61), (4, 16), 'parameter "embed.weight": 61 elements padded to 64 for 4 ranks'),
        ("tp", {"tp": 4}, dict(vocab=9, tied=True), (4, 16), "9 elements padded to 12 for 4 ranks"),
        ("tp_sp", {"tp": 2}, {}, (4, 17), '17 elements padded to 18 for 2 ranks of "tp" (+5.9%); and 2 more'),
        ("kv_allgather", {"cp": 3}, {}, (4, 16), '16 elements padded to 18 for 3 ranks of "cp" (+12.5%)'),
        ("zero3", {"dp": 4}, {}, (3, 16), '3 elements padded to 4 for 4 ranks of "dp" (+33.3%)'),
        (
            "tp",
            {"tp": 4},
            dict(hidden=48, heads=6, kv_heads=6, bias=True),
            (4, 16),
            "6 elements padded to 8 for 4 ranks",
        ),
        ("tp", {"tp": 2}, dict(hidden=24, heads=3, kv_heads=1), (4, 16), "3 elements padded to 4 for 2 ranks"),
        ("ulysses", {"cp": 4}, dict(hidden=48, heads=6, kv_heads=3), (4, 16), "6 elements padded to 8 for 4 ranks"),
        ("tp", {"tp": 2}, dict(ffn=11), (4, 16), "11 elements padded to 12 for 2 ranks"),
        ("ep", {"ep": 4}, dict(experts=6), (4, 16), "6 elements padded to 8 for 4 ranks"),
        ("ep_alltoall", {"ep": 4}, dict(experts=6), (3, 17), "3 elements padded to 4 for 4 ranks"),
    ],
)
def test_what_is_padded_and_by_how_much(plan, mesh, sizes, batch, says):
    model = build(plan, sizes)
    ids, labels = (torch.randint(0, sizes.get("vocab", 60), batch) for _ in range(2))
    result = equal(model, mesh, plan, ids, labels)
    assert any(says in text for text in result.padded), result.padded


@pytest.mark.parametrize(
    "plan,mesh",
    [
        ("zero2+tp_sp", {"dp": 2, "tp": 2}),
        pytest.param("zero3+ulysses", {"dp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("zero2+ring", {"dp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("zero2+tp_2d", {"dp": 2, "tp_x": 2, "tp_y": 2}, marks=pytest.mark.slow),
    ],
)
def test_everything_at_once(plan, mesh):
    model = build(plan, dict(vocab=61, ffn=63, hidden=24, heads=3, kv_heads=3, bias=True))
    model.checkpointed = True
    equal(model, mesh, plan, *(torch.randint(0, 60, (3, 17)) for _ in range(2)))


def test_parts_of_a_vocabulary_where_a_rank_has_none():
    """Nine classes on five ranks: two, two, two, two and one; eight on five: the last has none."""
    for vocab, loss in ((9, {}), (8, {}), (8, {"enable": ["fusion.linear_cross_entropy"], "strict": True})):
        model = build("tp", dict(vocab=vocab, z_loss=0.0))
        ids, labels = (torch.randint(0, vocab, (4, 16)) for _ in range(2))
        equal(model, {"tp": 5}, "tp", ids, labels, options=loss)


def test_fewer_heads_of_keys_than_ranks_are_repeated():
    """Two heads of keys for eight of queries on four ranks: each rank has the two queries and the one key they read."""
    model = Llama(1, hidden=32, heads=8, kv_heads=2).double()
    ids, labels = (torch.randint(0, 60, (4, 16)) for _ in range(2))
    result = equal(model, {"cp": 4}, "ulysses", ids, labels)
    assert len(result.whole) == 1 and "dimension 1 has 2 elements" in result.whole[0]


class Packed(torch.nn.Module):
    """Queries, keys and values in one projection, whose name no plan knows, and a row layer behind it."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv_proj, self.o_proj = (
            torch.nn.Embedding(64, 16),
            torch.nn.Linear(16, 48),
            torch.nn.Linear(16, 16),
        )

    def forward(self, ids, labels):
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv_proj(self.embed(ids)).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.o_proj(out).flatten(0, 1), labels.flatten() % 16)


@pytest.mark.parametrize("plan", ["tp", pytest.param("tp_sp", marks=pytest.mark.slow)])
def test_what_a_plan_cannot_divide_stays_whole(plan):
    model = Packed().double()
    named = named_plan(plan, model)
    assert whole_layers(model, named) == ["qkv_proj"] and named.parameters["o_proj.weight"] == {"tp": "S(1)"}
    ids, labels = (torch.randint(0, 60, (4, 16)) for _ in range(2))
    equal(model, {"tp": 2}, named, ids, labels)


class Table(torch.nn.Module):
    """Adds the weight of an embedding itself, which has no batch, as relative positions do."""

    def __init__(self):
        super().__init__()
        self.embed, self.table = torch.nn.Embedding(64, 32), torch.nn.Embedding(32, 32)
        self.fc1, self.fc2 = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, ids, labels):
        x = self.embed(ids) + self.table.weight[: ids.shape[1]]
        return F.cross_entropy(self.fc2(torch.relu(self.fc1(x))).flatten(0, 1), labels.flatten() % 32)


def test_what_has_fewer_dimensions_than_a_plan_divides_stays_whole():
    model = Table().double()
    ids, labels = (torch.randint(0, 60, (4, 16)) for _ in range(2))
    mesh = {"tp_x": 2, "tp_y": 2}
    result = equal(model, mesh, "tp_2d", ids, labels)
    assert ["placement S(2) of a tensor of 2 dimensions" in reason for reason in result.whole] == [True]
    with pytest.raises(ShardingError, match=r"placement S\(2\) of a tensor of 2 dimensions"):
        simulate(model, mesh, named_plan("tp_2d", model, strict=True), ids, labels)
