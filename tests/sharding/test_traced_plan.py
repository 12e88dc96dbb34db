"""A plan that the search returns is one of which a rank can make its program."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.planning.prove_plan import prove_plan
from mindspeed_fx.planning.search import _first_that_traces, traced_plan
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from tests.sharding.llama import Llama
from tests.sharding.mixtral import Mixtral
from tests.sharding.test_packed import Packed, equal_to_one_device


def searched(model, args, **settings):
    return mindspeed_fx.plan(model, args, hardware="ascend910b2", pipeline=False, microbatches=1, **settings)


def tokens():
    ids = torch.randint(0, 32, (4, 8))
    return ids, ids.roll(1, 1)


class Checked(Packed):
    """Numbers are read from tensors, as transformers reads whether there are as many image tokens as features."""

    def forward(self, x):
        rows = x.detach().abs().amax((1, 2)).argmax().item()
        torch._check(rows < 4)
        return super().forward(x) + rows


MODELS = {
    "checked": lambda: (Checked(), (torch.randn(4, 8, 16, dtype=torch.float64),)),
    "llama": lambda: (Llama(3).double(), tokens()),
    "mixtral": lambda: (Mixtral(2).double(), tokens()),
    "packed": lambda: (Packed(), (torch.randn(4, 8, 16, dtype=torch.float64),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_returned_plan_traces_and_runs(name):
    torch.manual_seed(0)
    model, args = MODELS[name]()
    plan = searched(model, args, mesh={"dp": 2, "tp": 2})
    assert (plan.unsupported, plan.refused) == ([], {})
    equal_to_one_device(model, args, simulate(model, plan.sizes, plan, *args))


class OnItsDevice(Packed):
    """Positions and a factor are made where the arguments are, as transformers makes its angles."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.linspace(0, 1, 16))

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device).unsqueeze(-1) * self.rates.to(device=x.device, dtype=x.dtype)
        return super().forward(x + steps.cos() * torch.full((), 0.5, device=x.device))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_where_a_model_lies_does_not_matter(device):
    x = torch.empty(4, 8, 16, dtype=torch.float64, device=device)
    model = OnItsDevice().to(device)
    plan = searched(model, (x,), mesh={"dp": 2, "tp": 2})
    assert (plan.unsupported, plan.refused) == ([], {})
    states = {r.state for r in prove_plan(model, plan.sizes, plan, x).results}  # its packed gate has no proof
    assert states == {"unknown"}


def test_experts_lie_over_one_of_two_data_dimensions():
    """Tokens are sent over one mesh dimension: the other one divides their weights elsewhere, and gathers them."""
    torch.manual_seed(0)
    model, args = Mixtral(1).double(), tokens()
    plan = searched(model, args, mesh={"dp": 2, "cp": 2}, zero="zero2")
    assert (plan.unsupported, plan.refused) == ([], {})
    assert plan.parameters["layers.0.mlp.experts.gate"] == {"dp": "S(0)", "cp": "S(1)"}
    equal_to_one_device(model, args, simulate(model, plan.sizes, plan, *args))


def test_why_a_plan_fails_is_one_line():
    model, args = MODELS["packed"]()
    traced = searched(model, args, mesh={"tp": 2}, trace=False).searched.problem.traced
    plan = Plan("mine", ("tp",), modules={"down": Boundary(input={"tp": "S(7)"})})
    assert "placement S(7) of a tensor of 3 dimensions" in traced_plan.find_failure(traced, plan, {"tp": 2})
    assert traced_plan.find_failure(traced, Plan("mine", ("tp",)), {"tp": 2}) is None


def test_a_plan_that_fails_is_not_returned_and_says_why(monkeypatch):
    model, args = MODELS["packed"]()
    first = searched(model, args, devices=2, keep=2, trace=False)
    names = [p.name for p in first.alternatives]
    monkeypatch.setattr(traced_plan, "find_failure", lambda t, plan, s: "too odd" if plan.name == names[0] else None)
    first.searched.tried.asked = True
    second = _first_that_traces(first.searched)
    assert second.name == names[1]
    assert second.refused == {names[0]: "too odd"} == second.summary()["refused"]
    assert f"not returned: {names[0]}: too odd" in str(second)
    assert second.explain(names[0]) == f"{names[0]} was not returned: too odd"
    assert [p.name for p in second.alternatives] == [names[1]]
    monkeypatch.setattr(traced_plan, "find_failure", lambda *_: "too odd")
    first.searched.tried.passed.clear()
    with pytest.raises(ShardingError, match="no rank can make its program of the plans that fit .*too odd"):
        _first_that_traces(first.searched)


def test_what_is_listed_was_tried_or_says_that_it_was_not(monkeypatch):
    model, args = MODELS["packed"]()
    plan = searched(model, args, devices=2, keep=3)
    names = [str(s.layout) for s in plan.searched.outcome.solutions]
    tried = []

    def fails(traced, other, sizes):
        tried.append(other.name)
        return "too odd" if other.name == names[2] else None

    monkeypatch.setattr(traced_plan, "find_failure", fails)
    for _ in range(2):
        assert [p.name for p in plan.alternatives] == [plan.name, names[1]] and tried == names[1:]
    assert plan.refused == {names[2]: "too odd"}
    untried = searched(model, args, devices=2, keep=2, trace=False)
    assert [p.row()["runs"] for p in untried.alternatives] == ["not tried"] * 2
    assert tried == names[1:]
