"""Searched plans of models whose experts are a list of modules: the list is divided as stacked weights are."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.problem import Parameter
from mindspeed_fx.planning.search.stacked_experts import at_rest, bytes_at_rest
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Plan
from mindspeed_fx.sharding.presets import named_plan
from tests import ranks
from tests.sharding import listed_experts, listed_ranks
from tests.sharding.listed_experts import Masked, Model, Where, Written


def searched(monkeypatch, spelling, mesh, layers=1, hidden=8, wide=12, seq=6, memory=None):
    """A plan of a model of any size; the sizes are forgotten afterwards."""
    with monkeypatch.context() as patch, torch.device("meta"):
        patch.setattr(listed_experts, "HIDDEN", hidden)
        patch.setattr(listed_experts, "WIDE", wide)
        model, ids = Model(spelling, layers=layers), torch.zeros(4, seq, dtype=torch.long)
        plan = mindspeed_fx.plan(model, (ids,), mesh=mesh, hardware="ascend910b2", memory=memory, keep=1)
    assert plan.unsupported == [] and plan.refused == {}
    return Plan.from_dict(plan.as_dict()), plan


def agrees(spelling, mesh, plan, layers=1):
    """Loss and gradients of every rank are those of one device, in float64."""
    torch.manual_seed(0)
    model, ids = Model(spelling, layers=layers).double(), torch.randint(0, 32, (4, 6))
    loss = model(ids)
    loss.backward()
    result = simulate(model, mesh, plan, ids)
    assert abs(result.outputs[0] - loss) <= 1e-12 * abs(loss)
    for name, p in model.named_parameters():
        wanted = torch.zeros_like(p) if p.grad is None else p.grad
        assert (result.gradients[name] - wanted).abs().max() <= 1e-12 * max(1e-3, wanted.abs().max()), name
    assert not result.whole
    return result


SLOW = pytest.mark.slow


@pytest.mark.parametrize("spelling, mesh, layers", [
    (Where, {"ep": 2}, 1),
    (Masked, {"ep": 2}, 1),
    pytest.param(Written, {"ep": 2}, 1, marks=SLOW),
    pytest.param(Where, {"ep": 4}, 3, marks=SLOW),
    pytest.param(Where, {"dp": 2, "ep": 2}, 1, marks=SLOW),
    pytest.param(Masked, {"dp": 2, "ep": 2}, 1, marks=SLOW),
    pytest.param(Where, {"cp": 2, "ep": 2}, 1, marks=SLOW),
    pytest.param(Masked, {"dp": 2}, 1, marks=SLOW),
    pytest.param(Where, {"cp": 2}, 3, marks=SLOW),
])  # fmt: skip
def test_a_list_is_divided_over_ep(monkeypatch, spelling, mesh, layers):
    plan, _ = searched(monkeypatch, spelling, mesh, layers)
    experts = [placed for name, placed in plan.parameters.items() if ".experts." in name]
    assert all(placed.get("ep") == ("S(0)" if "ep" in mesh else None) for placed in experts)
    assert ("ep" in mesh) == ("mindspeed.grouped_matmul" in plan.operators)
    result = agrees(spelling, mesh, plan, layers)
    if mesh == {"ep": 2}:  # of tokens and of each weight (and bias) of a list: whole experts come together
        assert result.forward["all_to_all_single"] == 3 + (4 if spelling is Masked else 3)


@pytest.mark.slow
@pytest.mark.parametrize("spelling, mesh, memory", [
    (Where, {"tp": 2}, "24GiB"),
    (Where, {"ep": 2, "tp": 2}, "13GiB"),
    (Masked, {"tp": 2}, "20GiB"),
    (Masked, {"ep": 2, "tp": 2}, "10GiB"),
])  # fmt: skip
def test_a_list_is_divided_over_tp_where_whole_weights_do_not_fit(monkeypatch, spelling, mesh, memory):
    plan, _ = searched(monkeypatch, spelling, mesh, hidden=4096, wide=16384, seq=4096, memory=memory)
    placed = plan.operators["mindspeed.grouped_matmul"].arguments["weight"]
    assert placed == dict.fromkeys(mesh, "S(0)")
    agrees(spelling, mesh, plan)


def test_layers_that_repeat_are_told_from_experts(monkeypatch):
    """Experts that have an iterator of their own were taken for layers, of which two were traced."""
    _, plan = searched(monkeypatch, Written, {"ep": 2})
    assert not any("experts" in layer for run in plan.searched.problem.runs for layer in run)
    sizes = {p.name: p.shape for p in plan.searched.problem.parameters if p.stacked}
    assert sizes["layers.0.mlp.experts.*.gate_proj.weight"] == (4, 12, 8) and len(sizes) == 3
    one, all_of_them = (plan.explain(f"layers.0.mlp.experts.{e}.gate_proj.weight", "R") for e in ("1", "*"))
    assert one.partition(" as ")[2] == all_of_them.partition(" as ")[2]
    named = plan.price(named_plan("ep_alltoall", Model(Written)))
    assert named.seconds >= plan.seconds and named.layout.ep == 2


def test_parts_at_rest():
    weight, bias = Parameter("e.*.w", (8, 12, 6), 4, True, True), Parameter("e.*.b", (8, 12), 4, True, True)
    zero = Layout(dp=3, ep=2, tp=2, zero="zero2")
    assert at_rest(weight, zero, True) == {"ep": 0, "tp": 1}  # dp would take parts of the first for experts
    assert at_rest(weight, zero, False) == {"ep": 0, "dp": 1}
    assert at_rest(bias, zero, True) == {"ep": 0}
    assert at_rest(weight, Layout(dp=2, ep=5), True) == {}
    assert bytes_at_rest(weight, zero, False) == weight.bytes / 6


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"ep": 2}, {"dp": 2, "ep": 2}])
def test_processes(monkeypatch, tmp_path, mesh):
    plan, _ = searched(monkeypatch, Where, mesh)
    count = torch.Size(mesh.values()).numel()
    ranks.spawn(listed_ranks.worker, (str(tmp_path / "s"), ["Where"], mesh, plan, "eager", True), nprocs=count)
