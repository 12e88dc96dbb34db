"""The search for a plan of a mixture of experts: optimal among all meshes, executed exactly, and with reasons."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import Layout, meshes
from mindspeed_fx.planning.search.model_graph import trace_model
from mindspeed_fx.sharding.plan import Plan, ShardingError
from tests.sharding.mixtral import Mixtral
from tests.sharding.searched_problems import mixture_problem, runs_as_one_device

GiB = 2**30
HW = hardware("ascend910b2")


@pytest.fixture(scope="module")
def mixture():
    return mixture_problem()


@pytest.mark.parametrize(
    "mesh,batch,runs,placed",
    [
        ({"cp": 4, "ep": 4, "tp": 4}, 4, {"cp": 2, "ep": 2, "tp": 2}, "S(0)"),
        pytest.param({"ep": 4, "tp": 2}, 4, {"ep": 2, "tp": 2}, "S(0)", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 2}, 64, {"dp": 2, "ep": 2}, None, marks=pytest.mark.slow),
        pytest.param({"tp": 8}, 4, {"tp": 4}, "S(0)", marks=pytest.mark.slow),
        pytest.param({"cp": 4, "ep": 4}, 4, {"cp": 2, "ep": 2}, None, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 4, "tp": 4}, 64, {"dp": 2, "ep": 2, "tp": 2}, None, marks=pytest.mark.slow),
    ],
)
def test_found_plans_of_mixtures_run_on_all_ranks(mesh, batch, runs, placed):
    """Experts over ep, and over tp where that is better; everything else divided over ep too, and gathered."""
    sizes = dict(hidden=4096, heads=32, kv_heads=8, ffn=2048, vocab=32768, experts=64, chosen=8)
    with torch.device("meta"):
        model = Mixtral(4, shared=True, **sizes).bfloat16()
        args = [torch.zeros(batch, 4096, dtype=torch.long) for _ in range(2)]
    plan = mindspeed_fx.plan(model, args, mesh=mesh, hardware="ascend910b2")
    assert not plan.unsupported and Plan.from_dict(plan.as_dict()).as_dict() == plan.as_dict()
    for name in ("gate", "up", "down"):
        assert plan.parameters[f"layers.*.mlp.experts.{name}"].get("ep") == ("S(0)" if "ep" in mesh else None)
        assert plan.parameters[f"layers.*.mlp.experts.{name}"].get("tp") == placed
    runs_as_one_device(plan, runs, Mixtral(2, shared=True).double())


def test_all_weights_of_experts_are_divided_over_ep():
    with torch.device("meta"):
        model, ids = (
            Mixtral(2, hidden=1024, ffn=2048, heads=8, kv_heads=8, experts=64, vocab=256).bfloat16(),
            torch.zeros(8, 512, dtype=torch.long),
        )
    found = trace_model(model, (ids, ids.clone()), {})
    one, many = (
        branch_and_bound(
            found, HW, n, 1e15, keep=1, fixed={"pp": 1, "dp": 1, "cp": 1, "ep": n, "tp": 1}, zero=("never",)
        ).solutions[0]
        for n in (1, 8)
    )
    shares = [many.prices[n].state / one.prices[n].state for n in found.nodes if n.op == "grouped_matmul"]
    assert shares == [1 / 8] * len(shares) and len(shares) % 3 == 0


class Loop(nn.Module):
    """A mixture as a loop over a list of experts, each for all tokens or for those that chose it."""

    def __init__(self, dense: bool):
        super().__init__()
        self.router, self.experts, self.dense = (
            nn.Linear(32, 4),
            nn.ModuleList(nn.Linear(32, 32) for _ in range(4)),
            dense,
        )

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            out = out + expert(x) * mine.unsqueeze(-1) if self.dense else out.index_put((mine,), expert(x[mine]))
        return out.square().mean()


@pytest.mark.parametrize(
    "dense,says",
    [
        (True, 'mesh dimension "ep" divides experts, and none were found'),
        (False, "a loop over a list of experts cannot be read: .*stacked weights"),
    ],
)
def test_a_loop_that_cannot_be_read_has_no_experts(dense, says):
    with pytest.raises(ShardingError, match=says):
        mindspeed_fx.plan(Loop(dense), (torch.zeros(8, 32),), mesh={"ep": 2}, hardware="ascend910b2")


def test_more_ranks_than_experts_are_modelled_alone():
    """Eight experts on sixteen ranks: divided inside, with the reason; on eight by number."""
    with torch.device("meta"):
        model, args = (
            Mixtral(4, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32768, experts=8).bfloat16(),
            [torch.zeros(4, 4096, dtype=torch.long) for _ in range(2)],
        )
    plan = mindspeed_fx.plan(model, args, mesh={"ep": 4, "tp": 4}, hardware="ascend910b2")
    assert [u for u in plan.unsupported if "too many ranks for 8 experts" in u]
    assert not mindspeed_fx.plan(model, args, mesh={"ep": 4, "tp": 2}, hardware="ascend910b2").unsupported


def test_no_mesh_is_lost(mixture):
    """The best meshes of a search over all are those of searches of one mesh each: no bound is above what it bounds."""
    found = branch_and_bound(mixture, HW, 8, 20 * GiB, keep=4)
    alone = {}
    for mesh in meshes(8, 8, 4096, 4, 4, {}, True, HW.node):
        try:
            alone[mesh] = (
                branch_and_bound(
                    mixture, HW, 8, 20 * GiB, keep=1, fixed=dict(zip(("pp", "dp", "cp", "ep", "tp"), mesh))
                )
                .solutions[0]
                .seconds
            )
        except ShardingError as e:
            assert "fits" in str(e)
    assert found.layouts >= len(alone) > 20 > found.solved / 4
    assert [(s.layout.mesh, s.seconds) for s in found.solutions] == [
        (m, pytest.approx(t, rel=1e-4)) for m, t in sorted(alone.items(), key=lambda x: x[1])[:4]
    ]


def test_prices_do_not_depend_on_what_was_priced_before(mixture):
    layouts = [
        Layout(1, dp, cp, ep, tp, m, zero)
        for dp, cp, ep, tp in itertools.product((1, 2), (1, 4), (1, 4), (1, 4))
        for m, zero in ((1, "never"), (2, "zero3"))
    ]
    forth, back = Prices(mixture, HW), Prices(mixture, HW)
    seen = [{x: priced(prices, x) for x in order} for prices, order in ((forth, layouts), (back, layouts[::-1]))]
    assert sum(seen[0][x] == seen[1][x] for x in layouts) == len(layouts)


def priced(prices, layout):
    return [
        (n.name, s.ins, s.outs, prices.price(n, s, layout))
        for n in prices.problem.nodes
        for s in prices.space.strategies(n, layout)
    ]
