"""Experts that are a list of modules with a loop over them: divided, or run as they are written."""

from __future__ import annotations

import builtins

import pytest
import torch

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding import expert_lists
from mindspeed_fx.sharding.expert_lists import Reading, keep_in_one_graph, listed_parameters
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.presets import named_plan
from tests import ranks
from tests.sharding import listed_experts, listed_ranks
from tests.sharding.listed_experts import SPELLINGS, UNREAD, Columns, Masked, Model, Where


def model_of(spelling, **settings):
    torch.manual_seed(0)
    return Model(spelling, **settings).double()


def checked(model, mesh, plan, ids=None, **settings):
    """Loss and every gradient of all ranks are those of one device."""
    ids = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(1)) if ids is None else ids
    loss = model(ids)
    loss.backward()
    result = simulate(model, mesh, plan, ids, **settings)
    assert abs(result.outputs[0] - loss) <= 1e-12 * abs(loss)
    for name, p in model.named_parameters():
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        got = result.gradients.get(name, torch.zeros_like(p))
        assert (got - wanted).abs().max() <= 1e-12 * max(1e-3, wanted.abs().max()), name
    return result


@pytest.mark.parametrize("spelling", [
    s if s.__name__ in ("Where", "Written", "Masked") else pytest.param(s, marks=pytest.mark.slow) for s in SPELLINGS
], ids=lambda s: s.__name__)  # fmt: skip
def test_every_spelling_sends_tokens_to_experts(spelling):
    """Of weights all-to-alls bring whole experts together; three of tokens, as with stacked experts."""
    result = checked(model_of(spelling), {"ep": 2}, "ep_alltoall")
    weights = 4 if spelling in (Masked, Columns) else 3  # two layers with biases each, or three without
    assert result.forward["all_to_all_single"] == 3 + weights and not result.whole


@pytest.mark.parametrize("mesh, plan", [
    ({"ep": 2}, "ep"),
    ({"ep": 2, "tp": 2}, "ep_alltoall+tp_sp"),
    pytest.param({"ep": 2, "tp": 2}, "ep+tp", marks=pytest.mark.slow),
    pytest.param({"ep": 2, "tp": 2}, "ep_alltoall+tp", marks=pytest.mark.slow),
    pytest.param({"dp": 2, "ep": 2}, "zero2+ep_alltoall", marks=pytest.mark.slow),
    pytest.param({"dp": 2, "ep": 2}, "zero3+ep", marks=pytest.mark.slow),
    pytest.param({"ep": 3}, "ep_alltoall", marks=pytest.mark.slow),
    pytest.param({"tp": 2}, "tp_sp", marks=pytest.mark.slow),
    pytest.param({"cp": 2}, "ulysses", marks=pytest.mark.slow),
    pytest.param({"dp": 2}, "zero3", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("spelling", [Where, pytest.param(Masked, marks=pytest.mark.slow)])
def test_equals_one_device(spelling, mesh, plan):
    checked(model_of(spelling), mesh, plan)


def test_an_expert_without_tokens():
    checked(model_of(Masked), {"ep": 2}, "ep_alltoall", ids=torch.full((4, 6), 7))


def test_each_rank_has_a_part_of_every_expert_at_rest():
    plan = named_plan("ep_alltoall", model_of(Where))
    assert plan.parameters["layers.0.mlp.experts.*.gate_proj.weight"] == {"ep": "S(0)"}
    joined = named_plan("ep_alltoall+tp", model_of(Where))  # columns are divided over tp along the other dimension
    assert joined.parameters["layers.0.mlp.experts.*.gate_proj.weight"] == {"ep": "S(1)"}


def test_lists_that_are_no_experts():
    """A list of layers is no list of experts, and its loop is left alone."""
    model = model_of(Where)
    assert all(".mlp.experts." in name for name in listed_parameters(model))
    with pytest.raises(ShardingError, match='plan "ep" found no experts'):
        named_plan("ep", torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])))


def test_lists_of_modules_in_a_class_of_no_module():
    """Code that was run from a text, as notebooks and configurations do, may belong to no module."""
    text = """
class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()
"""
    names = {"torch": torch, "__builtins__": {**vars(builtins), "__name__": None}}
    exec(text, names)
    model = names["Stack"]()
    assert type(model).forward.__module__ is None and not listed_parameters(model)


@pytest.mark.parametrize("spelling, says", [
    (UNREAD[0], "an expert's aten.layer_norm.default does not work row by row"),
    (UNREAD[1], "the number of rows that a mask chooses is computed with"),
    (listed_experts.Twice, "may name an expert twice"),
    (listed_experts.TwiceAdded, "may name an expert twice"),
    (listed_experts.Overwritten, "written by several experts, and not added"),
    (listed_experts.Frozen, "gradients off"),
    (listed_experts.Different, "do not compute alike"),
])  # fmt: skip
def test_a_loop_that_cannot_be_read_says_why(spelling, says):
    with pytest.raises(ShardingError, match=says):
        simulate(model_of(spelling), {"ep": 2}, "ep_alltoall", torch.zeros(4, 6, dtype=torch.long))


class Private(Where):
    """Calls what every class of Python calls: its parent's method, and a name of its own."""

    def mix(self, x, weights, choices):
        for _expert in self.experts:
            _chosen = torch.where(choices == 0)
        return super().mix(x, weights, choices)


class Mangled(Where):
    def mix(self, x, weights, choices):
        self.__own = [torch.where(choices == i)[0] for i, _ in enumerate(self.experts)]
        for i, _expert in enumerate(self.experts):
            self.__own[i] = torch.where(choices == i)
        return super().mix(x, weights, choices)


def test_a_copy_of_a_method_is_that_method():
    """A copy calls its class's parent; a method with a name that its class changes is none to be copied."""
    kept = [named_plan("ep", model_of(kind)).parameters for kind in (Where, Private)]
    assert kept[0] == kept[1]
    model = model_of(Private)
    keep_in_one_graph(model, Reading())
    mlp = model.layers[0].mlp
    assert type(mlp) is not Private and type(mlp).__mro__[1] is Private
    assert torch.equal(mlp(torch.ones(1, 2, 8).double()), model_of(Private).layers[0].mlp(torch.ones(1, 2, 8).double()))
    assert expert_lists._copy_of(Mangled.mix, ("experts",)) is None
    assert expert_lists._copy_of(Private.mix, ("experts",)) is not None


def on_gloo(tmp_path, spellings, mesh, plan, codegen="eager", fullgraph=True):
    count = 1
    for n in mesh.values():
        count *= n
    names = [s.__name__ for s in spellings]
    ranks.spawn(listed_ranks.worker, (str(tmp_path / "s"), names, mesh, plan, codegen, fullgraph), nprocs=count)


@pytest.mark.slow
def test_two_processes(tmp_path):
    on_gloo(tmp_path, [Where], {"ep": 2}, "ep_alltoall")


@pytest.mark.slow
@pytest.mark.parametrize("spellings, mesh, plan, codegen", [
    (SPELLINGS, {"ep": 2}, "ep_alltoall", "eager"),
    ([Where, Masked], {"ep": 2}, "ep_alltoall", "inductor"),
    ([Where, Masked], {"ep": 4}, "ep", "eager"),
    ([Where, Masked], {"ep": 2, "tp": 2}, "ep_alltoall+tp_sp", "eager"),
])  # fmt: skip
def test_processes(tmp_path, spellings, mesh, plan, codegen):
    on_gloo(tmp_path, spellings, mesh, plan, codegen)


@pytest.mark.slow
def test_a_loop_that_cannot_be_read_runs_as_it_is_written(tmp_path, capfd):
    on_gloo(tmp_path, UNREAD, {"ep": 2}, "ep_alltoall", fullgraph=False)
    assert "it is run as it is written, whole on every rank" in capfd.readouterr().out
