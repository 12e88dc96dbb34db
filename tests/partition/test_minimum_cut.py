"""The minimum cut that torch's partitioner asks networkx for: ours is the same."""

from __future__ import annotations

import math
import random

import networkx
import pytest
import torch

from mindspeed_fx.compat import partitioner
from mindspeed_fx.partition.partitioner import minimum_cut


def layered(seed: int, size: int = 40) -> networkx.DiGraph:
    """Values that are made of others, as torch's graph has them: "_in" is running one, "_out" having it."""
    dice, graph = random.Random(seed), networkx.DiGraph()
    for i in range(size):
        graph.add_edge(f"{i}_in", f"{i}_out", capacity=dice.choice((0, 1, 1, 2, 2, 3, 0.0, 64)))
        for j in dice.sample(range(i), min(i, 2)):
            graph.add_edge(f"{j}_out", f"{i}_in", capacity=math.inf)
        if dice.random() < 0.3:
            graph.add_edge("source", f"{i}_in", capacity=math.inf)
        if dice.random() < 0.2:
            graph.add_edge(f"{i}_out", "sink", capacity=math.inf)
    graph.add_edge("source", "0_in", capacity=math.inf)
    graph.add_edge(f"{size - 1}_out", "sink", capacity=math.inf)
    return graph


def test_sides_and_capacity_are_those_of_networkx():
    for seed in range(30):
        graph = layered(seed)
        assert minimum_cut(graph, "source", "sink") == networkx.minimum_cut(graph, "source", "sink")


def test_what_has_no_finite_cut_or_no_integers_is_left_to_networkx():
    graph = networkx.DiGraph()
    graph.add_edge("source", "a", capacity=math.inf)
    graph.add_edge("a", "sink", capacity=0.5)
    assert minimum_cut(graph, "source", "sink") is None
    graph["a"]["sink"]["capacity"] = math.inf
    assert minimum_cut(graph, "source", "sink") is None


def test_torch_asks_ours_and_not_networkx(monkeypatch):
    asked, own = [], networkx.minimum_cut

    def ask(*args):
        asked.append((args, minimum_cut(*args)))
        return asked[-1][1]

    monkeypatch.setattr("mindspeed_fx.partition.partitioner.minimum_cut", ask)
    monkeypatch.setattr(networkx, "minimum_cut", lambda *args: pytest.fail("networkx was asked"))
    x = torch.randn(4, 4, requires_grad=True)
    options = {"codegen": "eager", "disable": ["recompute.*"]}
    torch.compile(lambda x: x.sin().cos().sum(), backend="mindspeed", options=options)(x).backward()
    ((args, cut),) = asked
    assert cut == own(*args)


def test_torchs_partitioner_asks_for_ours(monkeypatch):
    def f(x):
        return x.sin().cos().exp().sum()

    asked = []
    own = networkx.minimum_cut
    monkeypatch.setattr(networkx, "minimum_cut", lambda *args: asked.append(args) or own(*args))
    options = {"codegen": "eager", "disable": ["recompute.budget"]}
    x = torch.randn(8, dtype=torch.double, requires_grad=True)
    torch._dynamo.reset()
    torch.compile(f, backend="mindspeed", options=options)(x).backward()
    assert not asked
    with partitioner._standing_in_for_networkx(lambda *_: (1.0, (set(), set()))):
        assert networkx.minimum_cut(layered(0), "source", "sink") == (1.0, (set(), set()))
    with partitioner._standing_in_for_networkx(None):
        assert networkx.minimum_cut(layered(0), "source", "sink") == own(layered(0), "source", "sink")
    assert len(asked) == 1
