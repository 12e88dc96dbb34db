"""Columns and rows read from the graph, whatever the layers are called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F

import mindspeed_fx
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding import presets
from mindspeed_fx.sharding.plan import Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from mindspeed_fx.sharding.roles import read_roles


class Block(nn.Module):
    """A layer of attention and a gated one, none of whose names says anything."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.xa, self.xb, self.xc, self.xd = (nn.Linear(width, width) for _ in range(4))
        self.ya, self.yb, self.yc = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)
        self.double()

    def forward(self, x):
        h = self.norm_a(x)
        q, k, v = (m(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.xa, self.xb, self.xc))
        x = x + self.xd(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm_b(x)
        x = x + self.yc(F.silu(self.ya(h)) * self.yb(h))
        return x.square().mean()


class Rotated(nn.Module):
    """Heads cut and put together again along their width, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.a(x).unflatten(-1, (4, 4))
        left, right = h.chunk(2, -1)
        return x + self.b((h + torch.cat((-right, left), -1)).flatten(2))


class Bare(nn.Module):
    """Weights that no linear layer holds, multiplied from either side, and attention as products."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(32, 16))
        self.qkv = nn.ParameterList(torch.randn(16, 16) for _ in range(3))
        self.out = nn.Parameter(torch.randn(16, 16))
        self.double()

    def forward(self, x):
        q, k, v = ((x @ w).unflatten(-1, (4, 4)).transpose(1, 2) for w in self.qkv)
        weights = (q @ k.transpose(-2, -1) * 0.5).softmax(-1)
        x = x + F.linear((weights @ v).transpose(1, 2).reshape(x.shape), self.out)
        return (x + F.gelu(F.linear(x, self.up)) @ self.down).square().mean()


class Kept(Block):
    """Rows whose number data decide, as of images that are more than padding."""

    def forward(self, x):
        largest = x.amax((1, 2))
        return super().forward(x[largest >= largest.mean()])


class LowRank(nn.Module):
    """Columns behind a norm of a narrow projection, as in latent attention."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.b, self.c = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 16)
        self.double()

    def forward(self, x):
        return (x + self.c(F.gelu(self.b(self.n(self.a(x)))))).square().mean()


COLUMNS = dict.fromkeys((Block, Kept), ("xa.weight", "ya.weight", "xd.weight")) | {Bare: ("qkv.0", "up", "down")}
"""Some of the weights that are divided, columns and rows."""


def test_unusual_names_are_read_from_the_graph():
    roles = read_roles(Block(), (torch.empty(2, 8, 16, dtype=torch.float64),))
    assert list(roles.columns) == [f"{n}.weight" for n in ("xa", "xb", "xc", "ya", "yb")]
    assert list(roles.rows) == ["xd.weight", "yc.weight"]
    assert roles.whole == {}


def test_cuts_inside_of_a_head_leave_heads_divided():
    roles = read_roles(Rotated(), (torch.empty(2, 8, 16),))
    assert (roles.columns, roles.rows, roles.whole) == ({"a.weight": 0}, {"b.weight": 1}, {})


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def test_a_pointwise_function_with_its_own_gradient_is_followed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return self.b(Doubled.apply(self.a(x)))

    assert read_roles(Model(), (torch.empty(2, 16),)).rows == {"b.weight": 1}


def test_a_norm_of_the_results_is_the_reason_to_stay_whole():
    roles = read_roles(LowRank(), (torch.empty(2, 8, 16, dtype=torch.float64),))
    assert (roles.columns, roles.rows) == ({"b.weight": 0}, {"c.weight": 1})
    assert roles.whole == {"a.weight": "aten.layer_norm.default needs its results whole"}


def test_a_layer_whose_results_are_needed_whole_is_divided_and_gathered():
    plan = named_plan("tp", LowRank(), args=(torch.empty(2, 8, 16, dtype=torch.float64),))
    assert (plan.parameters["a.weight"], plan.parameters["a.bias"]) == ({"tp": "S(0)"}, {"tp": "S(0)"})
    assert plan.modules["a"].output == {"tp": "R"}
    assert presets.whole_layers(LowRank(), plan) == []


class SharedGate(LowRank):
    """A factor for each token, as in front of a shared expert."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 1).double()

    def forward(self, x):
        return super().forward(x) * torch.sigmoid(self.gate(x)).mean()


@pytest.mark.parametrize("plan", ["tp", "tp_sp", "tp_2d"])
def test_a_layer_of_one_result_has_no_columns(plan):
    x = torch.empty(2, 8, 16, dtype=torch.float64)
    found = named_plan(plan, SharedGate(), args=(x,))
    assert not any("gate" in name for name in (*found.parameters, *found.modules))
    assert presets.whole_layers(SharedGate(), found) == []


class Scanned(nn.Module):
    """A state-space layer: a packed projection, a filter of each channel, decays of each, a convolution's bias."""

    def __init__(self, width=16, inner=24):
        super().__init__()
        self.a, self.b = nn.Linear(width, 2 * inner + 8, bias=False), nn.Linear(inner, width)
        self.filter = nn.Conv1d(inner + 8, inner + 8, 3, groups=inner + 8, padding=2)
        self.decay, self.step = nn.Parameter(torch.rand(inner)), nn.Parameter(torch.rand(inner, 1))
        self.inner = inner
        self.double()

    def forward(self, x):
        gate, hidden = self.a(x).split([self.inner, self.inner + 8], -1)
        hidden = F.silu(self.filter(hidden.transpose(1, 2))[..., : x.shape[1]])
        hidden, state = hidden.split([self.inner, 8], 1)
        hidden = (hidden * self.step).cumsum(-1) + state.pow(2).repeat_interleave(3, 1)
        hidden = torch.einsum("bcs,c->bsc", hidden, torch.exp(-self.decay))
        return (x + self.b(hidden * F.silu(gate))).square().mean()


def test_what_stands_beside_a_packed_projection_is_divided_with_it():
    torch.manual_seed(0)
    model, x = Scanned(), torch.randn(2, 8, 16, dtype=torch.float64)
    roles = read_roles(model, (x,))
    assert (roles.columns, roles.rows, roles.whole) == ({"a.weight": 0}, {"b.weight": 1}, {})
    assert roles.packed == {"a.weight": (24, 24, 8)}
    filters = {"filter.weight": (0, (24, 8)), "filter.bias": (0, (24, 8))}
    assert roles.companions == {**filters, "step": (0, (24,)), "decay": (0, (24,))}
    plan = named_plan("tp", model, args=(x,))
    assert plan.parameters["a.weight"] == {"tp": "S(0:24+24+8)"}
    loss = model(x)
    gradients = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
    result = simulate(model, {"tp": 2}, plan, x)
    torch.testing.assert_close(result.outputs[0], loss, rtol=1e-9, atol=1e-12)
    for n, g in gradients.items():
        torch.testing.assert_close(result.gradients[n], g, rtol=1e-9, atol=1e-12)
    assert result.forward == {"all_reduce": 1}  # nothing is gathered


@pytest.fixture
def mesh():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_a_model_without_pairs_says_what_is_in_the_way():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    with pytest.raises(ShardingError, match="no columns and rows .0.weight: aten.layer_norm.default needs its results"):
        named_plan("tp", model, args=(torch.empty(2, 8, 16),))


def test_parallelize_reads_roles_of_example_arguments(mesh):
    model = mindspeed_fx.parallelize(Block(), mesh, "tp", args=(torch.empty(2, 8, 16, dtype=torch.float64),))
    placed = {n: p.placements[0] for n, p in model.named_parameters()}
    assert (placed["ya.weight"], placed["yc.weight"], placed["xd.weight"]) == (Shard(0), Shard(1), Shard(1))


def test_example_arguments_are_for_plans_by_name(mesh):
    plan = Plan("mine", ("tp",), {"a.weight": {"tp": "S(0)"}})
    with pytest.raises(ShardingError, match="args and kwargs are for plans by name"):
        mindspeed_fx.parallelize(LowRank(), mesh, plan, args=(torch.empty(2, 8, 16),))


@pytest.mark.parametrize("name", ("tp", "tp_sp"))
@pytest.mark.parametrize("kind", (Block, Bare, Kept))
def test_plans_by_roles_are_equal_to_one_device(kind, name):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 8, 16, dtype=torch.float64)
    loss = model(x)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    plan = named_plan(name, model, args=(x,))
    assert {tuple(plan.parameters[n].values()) for n in COLUMNS[kind]} <= {("S(0)",), ("S(1)",)}
    result = simulate(model, {"tp": 2}, plan, x)
    torch.testing.assert_close(result.outputs[0], loss, rtol=1e-9, atol=1e-12)
    assert set(result.gradients) == set(gradients)
    for n, g in gradients.items():
        torch.testing.assert_close(result.gradients[n], g, rtol=1e-9, atol=1e-12)


def test_data_may_decide_how_many_rows_there_are():
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    expected, roles = read_roles(Block(), (x,)), read_roles(Kept(), (x,))
    assert (roles.columns, roles.rows, roles.whole) == (expected.columns, expected.rows, {})


class Taken(nn.Module):
    """Some of a layer's results, from a place on that data decide."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(4, 16)

    def forward(self, x):
        place = (x.detach()[0, 0] > 0).long().argmax().item()
        torch._check(place >= 0)
        torch._check(place <= 12)
        return x + self.b(self.a(x).narrow(-1, place, 4))


def test_results_at_places_that_data_decide_are_needed_whole():
    roles = read_roles(Taken(), (torch.ones(2, 8, 16),))
    assert roles.columns == {} and "takes results at places that data decide" in roles.whole["a.weight"]


def test_a_tied_layer_that_is_divided_by_its_other_name_does_not_stay_whole():
    model = nn.ModuleDict({"words": nn.Embedding(32, 16), "head": nn.Linear(16, 32, bias=False)})
    model["head"].weight = model["words"].weight
    assert presets.whole_layers(model, Plan("mine", ("tp",), {"words.weight": {"tp": "S(0)"}})) == []
    assert presets.whole_layers(model, Plan("mine", ("tp",))) == ["head"]


def test_bare_parameters_have_roles():
    roles = read_roles(Bare(), (torch.empty(2, 8, 16, dtype=torch.float64),))
    assert roles.columns == {"qkv.0": 1, "qkv.1": 1, "qkv.2": 1, "up": 0}
    assert roles.rows == {"out": 1, "down": 0}
    assert roles.whole == {}


def test_a_layer_as_wide_as_the_vocabulary_is_no_output_layer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.a, self.b = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(16, 16)
            self.last = nn.Linear(16, 32)
            self.last.weight = self.embedding.weight

        def forward(self, ids):
            x = self.embedding(ids)
            left, right = self.a(x).flip(-1).chunk(2, -1)
            return self.last(x + self.b(left * right))

    model = Model()
    with pytest.raises(ShardingError, match="a.weight: aten.flip.default needs its results whole"):
        named_plan("tp", model, args=(torch.zeros(2, 8, dtype=torch.int64),))
    assert read_roles(model, (torch.zeros(2, 8, dtype=torch.int64),)).output_layers == ["embedding.weight"]
