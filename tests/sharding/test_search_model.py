"""What the search for a plan sees of a model: axes, layers that are alike, parameters, and the meshes it tries."""

from __future__ import annotations

import logging
import types

import pytest
import torch
from torch import nn

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

from mindspeed_fx.planning.search.axes import Axes
from mindspeed_fx.planning.search.layer_dedup import repetition
from mindspeed_fx.planning.search.layouts import meshes
from mindspeed_fx.planning.search.model_graph import trace_model
from tests.sharding.llama import Llama
from tests.sharding.searched_problems import large
from tests.sharding.test_written_parts import Filled


def test_axes_without_elements_are_tied_to_nothing():
    axes = Axes()
    b, none, h = axes.new(4), axes.new(0), axes.new(8)
    viewed = axes.reshape([b, none, h], (4, 1, 0, 8))
    assert [axes.extent(d) for d in viewed] == [4, 1, 0, 8] and not set(axes.atoms(b)) & set(axes.atoms(viewed[0]))
    assert not axes.unify(b, none) and axes.unify(none, viewed[2])


def test_axes_follow_reshapes():
    axes = Axes()
    b, s, h = axes.new(4), axes.new(6), axes.new(32)
    heads = axes.reshape([b, s, h], (4, 6, 8, 4))
    assert axes.atoms(h) == axes.atoms(heads[2]) + axes.atoms(heads[3])
    flat = axes.reshape(heads, (24, 32))
    assert axes.atoms(flat[0]) == axes.atoms(b) + axes.atoms(s) and axes.atoms(flat[1]) == axes.atoms(h)
    weight = axes.new(32)
    assert axes.unify(weight, flat[1]) and axes.atoms(weight) == axes.atoms(h), (
        "a whole dimension takes on the parts of the other"
    )
    assert not axes.unify(axes.new(6), axes.new(4))
    assert axes.extent(axes.reshape([axes.new(6)], (4,))[0]) == 4, "what does not fit is a dimension of its own"


def test_two_of_each_kind_of_layer_are_traced():
    problem = trace_model(*large(), {})
    assert len(problem.runs) == 1 and len(problem.runs[0]) == 8
    deep = trace_model(*large(layers=80), {})
    assert len(deep.nodes) == len(problem.nodes) and len(deep.edges) == len(problem.edges)
    whole = trace_model(*large(layers=2), {})
    assert not whole.runs and len([n for n in problem.nodes if n.run == 0]) * 2 + len(
        [n for n in problem.nodes if n.run < 0]
    ) == len(whole.nodes)


def test_layers_that_differ_are_kinds_of_their_own():
    model, _ = large(layers=6)
    model.layers[2].mlp.gate_proj = nn.Linear(4096, 14336, bias=True, device="meta")
    assert [w for w, _ in repetition(model).runs] == [[f"layers.{i}" for i in (3, 4, 5)]]
    for i, layer in enumerate(model.layers):
        layer.layer_idx = i
    found = repetition(model)
    assert [len(w) for w, _ in found.runs] == [3] and any("layer_idx" in n for n in found.notes)
    assert (
        found.whole_name("layers.3.mlp.up_proj") == "layers.3.mlp.up_proj"
        and found.whole_name("layers.2.norm1") == "layers.2.norm1"
        and len(model.layers) == 6
    )


class Gated(nn.Linear):
    def forward(self, x, gate):
        return x + super().forward(x) * gate


class Shared(nn.Module):
    """Layers that all read one value that the model computes."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(Gated(8, 8) for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        shared = x.sin()
        for layer in self.layers:
            x = layer(x, shared)
        return x.sum()


def test_layers_that_read_one_value_are_alike():
    found = trace_model(Shared(), (torch.zeros(2, 4, dtype=torch.long),), {})
    assert [len(names) for names in found.runs] == [4] and not found.notes


class ByNumber(Llama):
    def forward(self, ids, labels):
        x = self.embed(ids)
        for i in range(4):
            x = x + self.layers[i].mlp(self.layers[i].norm1(x))
        return nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def test_a_model_that_counts_its_layers_is_traced_whole():
    model, args = ByNumber(layers=4), (torch.zeros(2, 8, dtype=torch.long),) * 2
    found = trace_model(model, (args[0], args[1].clone()), {})
    assert not found.runs and any("every layer was traced" in n for n in found.notes)
    assert {n.module.split(".")[1] for n in found.nodes if n.module.startswith("layers.")} == {"0", "1", "2", "3"}


def test_frozen_parameters_are_told_from_trained_ones():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    found = trace_model(model, (torch.zeros(4, 8),), {})
    assert {p.name: p.trained for p in found.parameters if p.users} == {
        "0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True
    }  # fmt: skip


def test_keys_that_are_filled_part_by_part_are_made_of_their_projection():
    """Writes into parts were dropped as read by nobody, and with them the projection of the keys from the search."""
    found = trace_model(Filled(), (torch.zeros(2, 8, 16),), {})
    assert sum(n.op.endswith("linear") for n in found.nodes) == 4
    parameters = {p.name.rpartition(".")[0] for p in found.parameters if p.users}
    assert "k_proj" in parameters


def test_meshes_divide_evenly():
    found = list(meshes(8, batch=4, sequence=6, layers=3, experts=0, fixed={}))
    assert all(
        pp * dp * cp * ep * tp == 8 and 4 % (dp * ep) == 0 and 6 % cp == 0 and pp <= 3 and ep == 1
        for pp, dp, cp, ep, tp in found
    )
    assert (1, 4, 2, 1, 1) in found and (2, 4, 1, 1, 1) in found and len(found) == len(set(found))


class Numbered(nn.Module):
    """Asks its configuration which kind the layer at hand has, as transformers' models ask for its mask."""

    def __init__(self, kinds):
        super().__init__()
        self.config = types.SimpleNamespace(kinds=kinds, sizes=[3, 5], window=4)
        self.order = list(range(len(kinds)))
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=kind == "whole") for kind in kinds)

    def forward(self, x):
        self.seen = []
        for i, layer in enumerate(self.layers):
            self.seen.append((self.config.kinds[i], "whole" if layer.bias is not None else "near", self.order[i]))
            x = layer(x)
        return x


def test_a_shortened_model_finds_the_kinds_of_the_layers_that_it_has():
    kinds = ["near"] * 3 + ["whole"] + ["near"] * 3 + ["whole"]
    model = nn.Sequential(Numbered(kinds))
    short = repetition(model).model
    short(torch.randn(2, 8))
    assert short[0].seen == [(k, k, i) for i, k in enumerate(kinds) if i not in (2, 6)]
    assert short[0].config.sizes == [3, 5] and short[0].config.window == 4
    assert model[0].config.kinds == kinds and model[0].order == list(range(8)), "the model itself was changed"


class Joined(nn.Module):
    """Runs with all of its layers alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.weights = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x):
        return (torch.stack([layer(x) for layer in self.layers]) * self.weights).sum()


def test_a_model_that_does_not_run_shortened_is_traced_whole_without_torchs_log(monkeypatch):
    logged = []
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)
    problem = trace_model(Joined(), (torch.randn(3, 8),), {})
    assert any("the model does not run with fewer layers" in note for note in problem.notes), problem.notes
    assert not logged
