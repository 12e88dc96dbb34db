"""Plans by search with a given number of stages, of models whose layers do not repeat, or whose first and last stage
share a weight.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

pytest.importorskip("scipy", reason="the search needs scipy's HiGHS")

import mindspeed_fx
from mindspeed_fx.planning.pipeline_stage import schedule_of
from mindspeed_fx.sharding.plan import Plan, ShardingError
from tests import ranks
from tests.sharding import virtual_ranks
from tests.sharding.searched_problems import large
from tests.sharding.test_simulated import checked


class Mixed(nn.Module):
    """Layers of two classes by turns, no three alike, and an output layer that is the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Bilinear(16, 16, 16), nn.Linear(16, 16)])

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x) if isinstance(layer, nn.Linear) else layer(x, x))
        return self.loss(x, labels)

    def loss(self, x, labels):
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), labels.flatten())


def test_layers_that_do_not_repeat_make_stages_too():
    model, args = Mixed().double(), tuple(torch.randint(0, 64, (4, 16)) for _ in range(2))
    plan = mindspeed_fx.plan(model, args, mesh={"pp": 3, "tp": 2}, hardware="ascend910b2")
    assert not plan.unsupported and plan.mesh[0] == "pp" and plan.sizes == {"pp": 3, "tp": 2}
    assert [row["layer"] for row in plan.layers()][1:] == [f"layers.{i} ... {i}" for i in range(3)]
    checked(model, plan.sizes, plan, *args)
    with pytest.raises(ShardingError, match='pp=4: "layers" has 3 layers; valid: 2 to 3 stages'):
        mindspeed_fx.plan(model, args, mesh={"pp": 4}, hardware="ascend910b2")


def test_more_stages_than_repeated_layers_are_refused_by_their_number():
    with pytest.raises(ShardingError, match='mesh dimension "pp": 8 stages need as many layers .* the model has 4'):
        mindspeed_fx.plan(*large(layers=4), mesh={"pp": 8}, hardware="ascend910b2")


class Weighted(nn.Module):
    """Attention to a mask that is computed of weights, as Doge's: it has a gradient."""

    def __init__(self):
        super().__init__()
        self.query, self.out, self.weights = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2, bias=False)

    def forward(self, x):
        heads = self.query(x).unflatten(-1, (2, 8)).transpose(1, 2)
        mask = self.weights(x).transpose(1, 2)[:, :, None, :].expand(-1, -1, x.shape[1], -1)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Masked(Mixed):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Weighted(), Weighted()])

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, labels)


@pytest.mark.parametrize("plan", [None, Plan("replicated", ("tp",)), "tp_sp"], ids=["searched", "replicated", "tp_sp"])
def test_what_a_stage_receives_is_as_the_plan_has_it(plan):
    """Ranks of tp send parts of it; where the plan does not divide the sequence, the stage computes on the whole."""
    model, args = Masked().double(), tuple(torch.randint(0, 64, (4, 16)) for _ in range(2))
    plan = plan or mindspeed_fx.plan(model, args, mesh={"pp": 2, "tp": 2}, hardware="ascend910b2")
    checked(model, {"pp": 2, "tp": 2}, plan, *args)


class Turned(Mixed):
    """Layers that run in turns, as HRM's: no stage can have the first of them alone."""

    turns = 1

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in [*self.layers, *self.layers[: self.turns]]:
            x = x + torch.tanh(layer(x))
        return self.loss(x, labels)


def test_a_model_that_has_no_stages_gets_no_plan_with_any():
    model, args = Turned().double(), tuple(torch.randint(0, 64, (4, 16)) for _ in range(2))
    with pytest.raises(ShardingError, match='mesh dimension "pp": .*layer 0 of layers reads what a later layer makes'):
        mindspeed_fx.plan(model, args, mesh={"pp": 2, "tp": 2}, hardware="ascend910b2")
    plan = mindspeed_fx.plan(model, args, devices=4, hardware="ascend910b2", keep=20)
    assert all("pp" not in p.mesh for p in plan.alternatives)
    assert "no plan has stages of a pipeline: " in str(plan) and "reads what a later layer makes" in str(plan)


class Numbered(Turned):
    """Reads a number from its arguments, as models with images do; data decide it."""

    turns = 0

    def forward(self, ids, labels):
        largest = ids.max().item()
        torch._check(largest < 64)
        return super().forward(ids, labels) + largest


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_models_that_read_numbers_are_planned_beside_stages(sizes):
    """Whether a call draws random numbers is asked of fake values, and left a symbol that the trace looked for."""
    model, args = Numbered().double(), tuple(torch.randint(0, 64, (4, 16)) for _ in range(2))
    plan = mindspeed_fx.plan(model, args, mesh=sizes, hardware="ascend910b2")
    checked(model, plan.sizes, plan, *args)


class Bounded(torch.autograd.Function):
    """A square root whose gradient has a bound of its own, as RecurrentGemma's."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / torch.sqrt(torch.clip(4.0 * ctx.saved_tensors[0], min=1e-2))


class Rooted(Mixed):
    def __init__(self):
        super().__init__()
        self.layers[1] = nn.Identity()

    def forward(self, ids, labels):
        x = Bounded.apply(self.embed(ids).square())
        x = x + Bounded.apply(self.layers[2](torch.relu(self.layers[0](x))).square())
        return self.loss(x, labels)


def test_custom_functions_of_each_element_are_divided():
    model, args = Rooted().double(), tuple(torch.randint(0, 64, (4, 16)) for _ in range(2))
    plan = mindspeed_fx.plan(model, args, mesh={"dp": 2, "tp": 2}, hardware="ascend910b2")
    assert not plan.unsupported
    checked(model, plan.sizes, plan, *args)


class Scan(nn.Module):
    """An associative scan of torch's, which Dynamo spells with vmap and whose calls capture keeps in bodies."""

    def __init__(self):
        super().__init__()
        self.rate, self.inputs = nn.Parameter(-torch.rand(16, 3)), nn.Linear(16, 38)

    def forward(self, x):
        u, dt, read, written = self.inputs(x).split([16, 16, 3, 3], -1)
        dt, u = nn.functional.softplus(dt).transpose(1, 2), u.transpose(1, 2)
        decays = torch.exp(self.rate[None, :, None] * dt[..., None])
        added = dt[..., None] * written[:, None] * u[..., None]
        _, states = associative_scan(
            lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decays, added), dim=2, combine_mode="generic"
        )
        return (states.transpose(1, 2) @ read.unsqueeze(-1)).squeeze(-1)


class Scans(Mixed):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Scan(), Scan()])

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.loss(x, labels)


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}])
def test_associative_scans_are_searched_and_divided_into_stages(mesh):
    """Nothing is left of the calls that combined tokens, of which an odd number has one that combines none; each stage
    has the whole of its scans."""
    model, args = Scans().double(), tuple(torch.randint(0, 64, (4, 7)) for _ in range(2))
    plan = mindspeed_fx.plan(model, args, mesh=mesh, hardware="ascend910b2")
    assert not plan.unsupported
    checked(model, plan.sizes, plan, *args)


def test_stages_are_searched_for_layers_that_do_not_repeat():
    with torch.device("meta"):
        model, args = Mixed(), tuple(torch.zeros(4, 16, dtype=torch.long) for _ in range(2))
    plan = mindspeed_fx.plan(model, args, devices=2, hardware="ascend910b2", keep=20, trace=False)
    assert any(p.layout.pp == 2 for p in plan.alternatives)
    one = mindspeed_fx.plan(model, args, devices=2, hardware="ascend910b2", keep=20, trace=False, pipeline=False)
    assert all(p.layout.pp == 1 for p in one.alternatives)


def test_a_plan_says_its_schedule_and_keeps_it(tmp_path):
    plan = mindspeed_fx.plan(*large(layers=4, batch=8), mesh={"pp": 2}, hardware="ascend910b2", trace=False)
    name, _, virtual = plan.schedule.partition(":")
    assert int(virtual) == 2 and f"Schedule{name} with {plan.microbatches} microbatches" in str(plan)
    plan.save(str(tmp_path / "plan.yaml"))
    assert Plan.load(str(tmp_path / "plan.yaml")).schedule == plan.schedule
    assert schedule_of(plan) == ("v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop", 2, None)
    assert schedule_of(Plan("by hand", ("pp",), schedule="1F1B:1:3+5")) == ("loop", 1, [3, 5])
    for wrong in ("Interleaved:2", "1F1B:0", "1F1B:x", "1F1B:1:3+", "1F1B:1:0+8"):
        with pytest.raises(ShardingError, match="schedule is .* valid: 1F1B, GPipe"):
            schedule_of(Plan("wrong", ("pp",), schedule=wrong))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_what_a_search_chose_runs(sizes, tmp_path):
    plan = mindspeed_fx.plan(*large(layers=4, batch=8), mesh=sizes, hardware="ascend910b2")
    name, virtual = plan.schedule.split(":")[:2]
    assert int(virtual) > 1 and plan.microbatches > 1 and not plan.unsupported
    kinds = [(f"Schedule{name}", "dense")]
    how = (str(tmp_path / "store"), plan.sizes, plan, kinds, virtual_ranks.EAGER)
    ranks.spawn(virtual_ranks.worker, how, nprocs=2 * len(sizes))
