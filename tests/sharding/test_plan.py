"""Plans as data: words in, words out, and what is refused."""

from __future__ import annotations

import pytest

from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from mindspeed_fx.sharding.presets import NAMED, _free_dim, named_plan
from tests.sharding.llama import Llama
from tests.sharding.test_experts import Mixture

PLAN = Plan(
    "mine",
    ("dp", "tp"),
    {"layers.*.q.weight": {"tp": "S(0)"}},
    {"ids": {"dp": "S(0)"}},
    {"layers.*.q": Boundary(input={"tp": "R"})},
    {"mindspeed.attention": Boundary(arguments={"q": {"tp": "S(1)"}})},
    {"dp": "zero2"},
)


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_saved_and_loaded_alike(tmp_path, ending):
    for plan in (PLAN, *(named_plan(n, Mixture() if n.startswith("ep") else Llama()) for n in NAMED)):
        plan.save(str(tmp_path / f"plan.{ending}"))
        assert Plan.load(str(tmp_path / f"plan.{ending}")) == plan


def test_what_has_one_element_is_not_divided():
    assert [_free_dim("experts.*.w", shape, None) for shape in ((1, 8), (8, 1), (1, 1))] == [1, 0, 0]


def test_the_head_of_a_grid_reads_whole_rows():
    plan = named_plan("tp_2d", Llama())
    assert plan.modules["head"] == Boundary(input=dict.fromkeys(plan.mesh, "R"))


def test_diff_names_what_changed():
    other = Plan.from_dict({**PLAN.as_dict(), "parameters": {"layers.*.q.weight": {"tp": "S(1)"}}})
    assert PLAN.diff(PLAN) == ""
    assert '-   "tp": "S(0)"' in PLAN.diff(other) and '+   "tp": "S(1)"' in PLAN.diff(other)


@pytest.mark.parametrize("change,says", [
    ({"paramters": {}}, 'unknown key "paramters" (did you mean "parameters"?)'),
    ({"parameters": {"w": {"tp": "S0"}}}, "placement 'S0'; valid: R (whole), S(d)"),
    ({"parameters": {"w": {"pt": "S(0)"}}}, 'no mesh dimension "pt" (did you mean "tp"?)'),
    ({"gather": {"dp": "zero4"}}, "valid: never, zero1, zero2, zero3"),
    ({"modules": {"q": {"inputs": {"tp": "R"}}}}, 'unknown key "inputs" (did you mean "input"?)'),
])  # fmt: skip
def test_what_is_wrong_in_a_plan(change, says):
    with pytest.raises(ShardingError) as error:
        Plan.from_dict({**PLAN.as_dict(), **change})
    assert says in str(error.value)


def test_plans_for_different_dimensions_add_up():
    both = named_plan("zero3+tp_sp", Llama())
    assert both.mesh == ("dp", "tp") and both.gather == {"dp": "zero3"}
    assert both.parameters["layers.0.attention.q_proj.weight"] == {"dp": "S(1)", "tp": "S(0)"}
    with pytest.raises(ShardingError, match="both use mesh dimension tp"):
        named_plan("tp+tp_sp", Llama())


def test_names_that_mean_nothing():
    with pytest.raises(ShardingError, match='no plan is named "tp_ps".*did you mean "tp_sp"'):
        named_plan("tp_ps", Llama())
    with pytest.raises(ShardingError, match="no column and row"):
        import torch

        named_plan("tp", torch.nn.Linear(4, 4))
