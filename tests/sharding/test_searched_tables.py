"""Searched plans of mixtures whose rows take something from a table of the experts, as GPT-OSS's take biases."""

from __future__ import annotations

import operator

import pytest
import torch

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.model_graph import capture_model, trace_model
from mindspeed_fx.planning.search.sorted_tables import with_sorted_tables
from mindspeed_fx.sharding.spmd.rows_by_expert import rows_by_expert
from tests.sharding import test_dispatch, test_experts
from tests.sharding.test_dispatch import BiasedExperts, Descending, Mixture

HW = hardware("ascend910b2")
IDS = torch.zeros(4, 6, dtype=torch.long)


def biased() -> Mixture:
    torch.manual_seed(0)
    model = Mixture(3.0)
    model.experts = BiasedExperts()
    return model


@pytest.fixture(scope="module")
def problem():
    return trace_model(biased(), (IDS,), {})


def test_the_rows_are_one_operator_and_nothing_sorts_for_them():
    gm, _ = capture_model(biased(), (IDS,), {})
    before = [n.name for n in gm.graph.nodes]
    named = with_sorted_tables(gm)
    assert [n.name for n in gm.graph.nodes] == before
    ops = [str(n.target) for n in named.graph.nodes if "sort" in str(n.target) or "aten.index" in str(n.target)]
    assert ops == []
    calls = named.graph.find_nodes(op="call_function", target=rows_by_expert)
    assert [tuple(n.args[1].meta["val"].shape) for n in calls] == [(4, 4), (4, 6)]
    assert {(n.args[0].target, n.args[0].args[1]) for n in calls} == {(operator.getitem, 0)}


@pytest.mark.parametrize("model", [Mixture(), Descending()])
def test_other_graphs_are_left_as_they_are(model):
    gm, _ = capture_model(model, (IDS,), {})
    assert with_sorted_tables(gm) is gm


def test_it_costs_what_taking_rows_costs_and_is_divided_as_rows_are(problem):
    """8 bytes for a place, 4 for a number of float32, 48 rows; a quarter of it where two ranks have half of the tokens
    and of the experts each."""
    nodes = [n for n in problem.nodes if n.op == "rows_by_expert"]
    assert [n.call.cost().read for n in nodes] == [48 * (8 + 4 * w) for w in (4, 6)]
    prices = Prices(problem, HW)
    whole, divided = (
        branch_and_bound(
            problem, HW, cp * ep, 1e12, keep=1, fixed={"pp": 1, "dp": 1, "cp": cp, "ep": ep, "tp": 1}, zero=("never",)
        ).solutions[0]
        for cp, ep in ((1, 1), (2, 2))
    )
    assert all(divided.prices[n].how == "" for n in problem.nodes)
    for n in nodes:
        assert divided.prices[n].state == whole.prices[n].state / 2
        rows = [
            prices.space.local(n.outs[0].dims, n.outs[0].shape, layout, {})[0]
            for layout in (Layout(), Layout(cp=2, ep=2))
        ]
        assert rows == [48, 12]


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"ep": 2}, {"cp": 2, "ep": 2}, {"ep": 2, "tp": 2}])
def test_found_plans_run(mesh):
    """Nothing more is sent for the table: counts, and rows each way."""
    model = biased()
    plan = mindspeed_fx.plan(model, (IDS,), mesh=mesh, hardware="ascend910b2", keep=1)
    assert plan.unsupported == [] and plan.refused == {}
    torch.manual_seed(1)
    result = test_dispatch.checked(model, mesh, plan, bound=1e-6)
    assert result.forward["all_to_all_single"] == 3 and not result.whole


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 2, "ep": 2}, {"cp": 2, "tp": 2}])
def test_gpt_oss(mesh):
    model, ids = test_experts.hugging_face("GptOss", "grouped_mm"), torch.randint(0, 32, (4, 8))
    plan = mindspeed_fx.plan(model, (ids,), mesh=mesh, hardware="ascend910b2", keep=1)
    assert plan.unsupported == [] and plan.refused == {}
    test_experts.checked(model, mesh, plan, ids)
