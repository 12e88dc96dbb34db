"""The search for a plan: optimal among all choices, no slower than the experts' plans, executed exactly, and strict."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.planning.search import highs
from mindspeed_fx.planning.search.axes import Axes
from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound
from mindspeed_fx.planning.search.constraints import following
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layer_dedup import repetition
from mindspeed_fx.planning.search.layouts import Layout, meshes
from mindspeed_fx.planning.search.model_graph import trace_model
from mindspeed_fx.planning.search.solution import Unsayable
from mindspeed_fx.planning.search.solve import Program
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from tests.sharding.llama import Llama
from tests.sharding.mixtral import Mixtral
from tests.sharding.searched_problems import large, mixture_problem
from tests.sharding.test_written_parts import Filled

GiB = 2**30
HW = hardware("ascend910b2")


@pytest.fixture(scope="module")
def problem():
    return trace_model(*large(), {})


@pytest.fixture(scope="module")
def mixture():
    return mixture_problem()


def test_keys_that_are_filled_part_by_part_are_made_of_their_projection():
    """Writes into parts were dropped as read by nobody, and with them the projection of the keys from the search."""
    found = trace_model(Filled(), (torch.zeros(2, 8, 16),), {})
    assert sum(n.op.endswith("linear") for n in found.nodes) == 4
    parameters = {p.name.rpartition(".")[0] for p in found.parameters if p.users}
    assert "k_proj" in parameters


def small_agrees(plan, mesh, model=None):
    """Runs ``plan`` for every rank on a small model of the same modules; compares it with one device."""
    model, (ids, labels) = model or Llama(layers=2).double(), (torch.randint(0, 64, (8, 16)) for _ in range(2))
    loss = model(ids, labels)
    loss.backward()
    result = simulate(model, mesh, plan, ids, labels)
    assert (result.outputs[0] - loss).abs() <= 1e-10 * loss.abs()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert result.gradients.keys() == gradients.keys()
    for name, g in gradients.items():
        assert g.abs().max() > 0 and (result.gradients[name] - g).abs().max() <= 1e-10 * g.abs().max(), name
    return result


# --------------------------------------------------------------------------- what the search sees


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


def test_two_of_each_kind_of_layer_are_traced(problem):
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


def test_meshes_divide_evenly():
    found = list(meshes(8, batch=4, sequence=6, layers=3, experts=0, fixed={}))
    assert all(
        pp * dp * cp * ep * tp == 8 and 4 % (dp * ep) == 0 and 6 % cp == 0 and pp <= 3 and ep == 1
        for pp, dp, cp, ep, tp in found
    )
    assert (1, 4, 2, 1, 1) in found and (2, 4, 1, 1, 1) in found and len(found) == len(set(found))


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
    result = small_agrees(plan, {"tp": 4})
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
    small_agrees(plan, dict.fromkeys(mesh, 2))


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
    small_agrees(plan, runs, Mixtral(2, shared=True).double())


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


def test_frozen_parameters_are_told_from_trained_ones():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    found = trace_model(model, (torch.zeros(4, 8),), {})
    assert {p.name: p.trained for p in found.parameters if p.users} == {
        "0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True
    }  # fmt: skip


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
from tests.sharding.test_search import large
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
