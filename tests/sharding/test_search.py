"""The search for a plan: optimal among all choices, no slower than the experts' plans, executed exactly, and strict."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.cost.collectives import collective_seconds
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.planning.search import highs
from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound
from mindspeed_fx.planning.search.constraints import following
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.model_graph import trace_model
from mindspeed_fx.planning.search.sayable import is_dimension
from mindspeed_fx.planning.search.solution import Unsayable
from mindspeed_fx.planning.search.solve import Program
from mindspeed_fx.planning.search.strategy_space import SUMMED, R
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from tests.sharding.llama import Llama
from tests.sharding.searched_problems import large, runs_as_one_device

GiB = 2**30
HW = hardware("ascend910b2")


@pytest.fixture(scope="module")
def problem():
    return trace_model(*large(), {})


# --------------------------------------------------------------------------- the best choice


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)

    def forward(self, x):
        return self.down(nn.functional.relu(self.up(x))).sum()


@pytest.mark.parametrize(
    "layout", [Layout(tp=4), Layout(dp=2, tp=4, zero="zero2"), Layout(tp=8, recompute="norm+activation_function")]
)
@pytest.mark.parametrize("batch", [1, 64])
def test_no_choice_is_better(layout, batch):
    """Every combination of every operator's strategies, one by one, without a memory limit and with two."""
    with torch.device("meta"):
        made = trace_model(Pair(), (torch.zeros(batch * layout.dp, 512, 1024),), {})
    program = Program(Prices(made, HW), layout, 1e15)
    program.priced()
    found = []
    for chosen in itertools.product(*(range(len(program.choices[n])) for n in program.nodes)):
        try:
            solution = program.evaluate(dict(zip(program.nodes, chosen)), 0.0)
        except Unsayable:  # a value that cannot go where it is wanted
            continue
        found.append((solution.seconds, solution.memory))
    fastest = min(found)
    for limit in (1e15, 0.5 * (fastest[1] + min(m for _, m in found)), min(m for _, m in found) * 1.001):
        program.limit = limit
        best = min(t for t, m in found if m <= limit)
        relaxed = program.solve()[0]
        bound, chosen = program.solve(integral=True)
        solution = program.evaluate(chosen, bound)
        assert relaxed <= best * (1 + 1e-6) and bound <= best * (1 + 1e-6)
        assert solution.seconds == pytest.approx(best, rel=2e-4) and solution.memory <= limit * (1 + 1e-5)


def test_megatrons_pattern_is_recovered_where_it_is_best():
    """One sequence on eight neighbours: columns, rows, the sequence divided in between."""
    model, args = large(batch=1)
    plan = mindspeed_fx.plan(model, args, mesh={"tp": 8}, hardware="ascend910b2")
    expert = named_plan("tp_sp", model)
    assert plan.gap < 1e-6 and plan.row()["sp"]
    for name, placed in expert.parameters.items():
        if name.startswith("layers.0."):
            assert plan.parameters[name.replace("layers.0.", "layers.*.")] == placed
    edges = {name.replace("layers.*.", "layers.0."): edge for name, edge in plan.modules.items()}
    assert {n: e for n, e in edges.items() if n.startswith("layers.")} == {
        n: e for n, e in expert.modules.items() if n.startswith("layers.0.")
    }
    assert plan.seconds <= plan.price(expert).seconds * (1 + 1e-6)
    words = [
        (c["module"], c["forward"], c["backward"]) for c in plan.collectives() if c["module"].startswith("layers.0.")
    ]
    assert sorted(words) == [
        ("layers.0.attention.o_proj", "reduce_scatter", "all_gather"),
        ("layers.0.mlp.down_proj", "reduce_scatter", "all_gather"),
        ("layers.0.norm1", "all_gather", "reduce_scatter"),
        ("layers.0.norm2", "all_gather", "reduce_scatter"),
    ]
    result = runs_as_one_device(plan, {"tp": 4})
    assert result.forward["reduce_scatter_tensor"] == 4 and result.forward["all_gather_into_tensor"] == 5
    assert "chosen" in plan.explain("layers.3.attention.q_proj", [torch.distributed.tensor.Shard(0)])
    assert "loses" in plan.explain("layers.3.attention.q_proj.weight", "S(1)") and "collectives +" in plan.explain(
        "layers.3.attention.q_proj", "S(1)"
    )
    assert "tp=8 -> tp: " in (text := plan.diff(named_plan("tp", model))) and "loses" in text and "+++ tp" in text
    with pytest.raises(ShardingError, match='did you mean "layers.3.attention.q_proj'):
        plan.explain("layers.3.attention.q_prj")


@pytest.mark.parametrize(
    "mesh,batch,seq",
    [
        ({"cp": 2, "tp": 2}, 1, 8192),
        pytest.param({"dp": 2, "tp": 4}, 4, 4096, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "cp": 2, "tp": 2}, 2, 16384, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, 64, 4096, marks=pytest.mark.slow),
    ],
)
def test_found_plans_run_on_all_ranks(mesh, batch, seq):
    plan = mindspeed_fx.plan(*large(batch=batch, seq=seq), mesh=mesh, hardware="ascend910b2")
    assert not plan.unsupported and plan.sizes == mesh and set(plan.gather.values()) <= {"zero2", "zero3"}
    assert Plan.from_dict(plan.as_dict()).as_dict() == plan.as_dict()
    runs_as_one_device(plan, dict.fromkeys(mesh, 2))


def test_no_expert_is_faster(problem):
    """Megatron TP+SP, FSDP and Ulysses, each at its best degree, under the same model."""
    model, _ = large()
    found = branch_and_bound(problem, HW, 8, 50 * GiB, keep=1)
    assert 0 <= found.gap < 0.01
    for tp, cp, plan in [(8, 1, "tp_sp"), (4, 1, "tp_sp"), (2, 1, "tp_sp"), (1, 1, None), (1, 8, None), (1, 4, None)]:
        fixed = {"pp": 1, "ep": 1, "tp": tp, "cp": cp, "dp": 8 // tp // cp}
        try:
            expert = branch_and_bound(
                problem,
                HW,
                8,
                50 * GiB,
                keep=1,
                fixed=fixed,
                allowed=following(named_plan(plan, model), problem) if plan else None,
            )
        except ShardingError as e:
            assert "fits" in str(e)
            continue
        assert found.solutions[0].seconds <= expert.solutions[0].seconds * (1 + 1e-6), (tp, cp, plan)


def test_memory_is_a_hard_limit(problem):
    fixed = {"pp": 1, "cp": 1, "ep": 1}
    free = branch_and_bound(problem, HW, 8, 1e15, keep=1, fixed=fixed).solutions[0]
    tight = branch_and_bound(problem, HW, 8, 0.6 * free.memory, keep=1, fixed=fixed).solutions[0]
    assert tight.memory <= 0.6 * free.memory and tight.seconds > free.seconds
    with pytest.raises(ShardingError, match="no plan for 8 ascend910b2 fits in 1.0 GiB"):
        branch_and_bound(problem, HW, 8, GiB, keep=1)


def test_attention_by_query_is_priced_with_and_without_optional_arguments(problem, monkeypatch):
    monkeypatch.setattr(Prices, "_by_query", lambda *_: True)
    node = next(n for n in problem.nodes if n.op == "attention")
    prices, seconds = Prices(problem, HW), []
    strategy = prices.space.strategies(node, Layout())[0]
    for count in (len(node.call.args), 6):
        call = dataclasses.replace(node.call, args=node.call.args[:count])
        short = dataclasses.replace(node, args=node.args[:count], call=call)
        seconds.append(prices._timed(short, strategy, Layout(), None, "", ""))
    assert seconds[0] == seconds[1]


def test_an_all_to_all_has_what_a_rank_holds(problem):
    """Queries, keys, values and result of attention, there and back, a fourth of each on every rank."""
    layout, node = Layout(cp=4), next(n for n in problem.nodes if n.op == "attention")
    ways = {}
    for way in ("ulysses", "kv_allgather"):
        prices = Prices(problem, HW, strategies=(way,))
        ways[way] = prices.price(node, prices.space.strategies(node, layout)[0], layout)
    assert [ways[w].how for w in ways] == list(ways)
    sizes = [math.prod(v.shape) * v.itemsize for v in (*(u.value for u in node.uses), node.outs[0])]
    sent = sum(2 * collective_seconds("all_to_all", n / 4, 4, HW) for n in sizes)
    gathered = sum(
        collective_seconds("all_gather", n, 4, HW) + collective_seconds("reduce_scatter", n, 4, HW) for n in sizes[1:3]
    )
    assert ways["ulysses"].moved == pytest.approx(sent) and ways["kv_allgather"].moved == pytest.approx(gathered)


def test_a_value_that_changes_its_dimension_on_tp_has_what_a_rank_holds(problem):
    layout = Layout(tp=4)
    program = Program(Prices(problem, HW), layout, GiB)
    program.priced()
    move = next(m for m in program.moves if len(m.value.shape) == 3)
    size = math.prod(move.value.shape) * move.value.itemsize
    for kind, share in (("all_to_all", 4), ("all_gather", 1)):
        fixed, each = program.lines[kind]
        assert fixed + each * program.bytes[move.value] == pytest.approx(collective_seconds(kind, size / share, 4, HW))


def test_a_plan_has_a_word_for_a_dimension_from_its_first_factor_on():
    """A program that moves a value elsewhere is none that a plan can say (Qwen3-Next, Mamba-2 under tp 8)."""
    dims = [(), (3, 5), (7,)]
    assert [is_dimension(t, dims) for t in (R, SUMMED, 3, 7)] == [True] * 4
    assert not is_dimension(5, dims) and not is_dimension(9, dims)


def test_linear_programs():
    """A second cost goes on from the first's optimum."""
    program = highs.Linear(
        ([0, 0, 1, 1], [0, 1, 0, 1], [1.0, 1.0, 1.0, -1.0]), [2, -np.inf], [np.inf, 1], 2
    )  # x + y >= 2, x - y <= 1
    for cost, optimum, place in (([1, 2], 2.5, [1.5, 0.5]), ([2, 1], 2, [0, 2])):
        value, x = program.minimum(np.array(cost, dtype=float))
        assert value == pytest.approx(optimum) and x.tolist() == pytest.approx(place)
    assert highs.Linear(([0], [0], [1.0]), [2], [1], 1).minimum(np.ones(1)) is None


# --------------------------------------------------------------------------- strict


def test_plans_with_a_pipeline_run_as_stages():
    plan = mindspeed_fx.plan(*large(batch=4), mesh={"pp": 2, "dp": 2, "tp": 2}, hardware="ascend910b2")
    assert plan.layout.microbatches == 2 and plan.solution.parts["bubble"] > 0
    assert not plan.unsupported and plan.sizes == {"pp": 2, "dp": 2, "tp": 2}
    tied = mindspeed_fx.plan(*large(batch=4, tied=True), mesh={"pp": 2, "dp": 4}, hardware="ascend910b2")
    assert not tied.unsupported
    with pytest.raises(ShardingError, match="pipeline_stage"):
        simulate(Llama(), {"dp": 2, "tp": 2}, plan, *(torch.zeros(4, 16, dtype=torch.long),) * 2)


@pytest.mark.parametrize(
    "given,says",
    [
        ({"devices": 0}, "devices is 0"),
        ({"mesh": {"tpp": 2}}, 'mesh dimension "tpp" (did you mean "tp"?)'),
        ({"mesh": {"tp": 2}, "devices": 3}, "devices is 3, and the mesh has 2"),
        ({"devices": 2, "optimizer": "adan"}, 'did you mean "adam"'),
        ({"devices": 2, "hardware": "ascend911"}, 'option "hardware"'),
        ({"devices": 2, "memory": "60GB/s"}, 'option "memory"'),
    ],
)
def test_wrong_words(given, says):
    with pytest.raises(ValueError) as error:
        mindspeed_fx.plan(Llama(), (torch.zeros(2, 8, dtype=torch.long),) * 2, **{"hardware": "h100", **given})
    assert says in str(error.value)


SCRIPT = """
from tests.sharding.searched_problems import large
def step():
    return large(layers=4, batch=2)
"""


def test_command(tmp_path, capsys):
    from mindspeed_fx.cli import main

    (tmp_path / "model.py").write_text(SCRIPT)
    assert (
        main(
            [
                "plan",
                f"{tmp_path}/model.py:step",
                "--mesh",
                "dp=2,tp=2",
                "--save",
                f"{tmp_path}/plan.yaml",
                "--html",
                f"{tmp_path}/plan.html",
                "--json",
            ]
        )
        == 0
    )
    made = json.loads(capsys.readouterr().out)
    best = made["plans"][0]
    assert (
        made["modelled"]
        and best["tp"] == 2
        and best["dp"] == 2
        and best["seconds"] > best["exposed_seconds"] > 0
        and best["bytes"] < made["memory_limit"]
    )
    assert Plan.load(f"{tmp_path}/plan.yaml").as_dict() == made["plan"]
    assert "<svg" in (page := (tmp_path / "plan.html").read_text()) and "layers.0.mlp.down_proj" in page
    assert main(["plan", f"{tmp_path}/model.py:step", "--mesh", "dp2"]) == 2
