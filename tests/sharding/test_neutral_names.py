"""Plans of models whose modules have names that say nothing, beside those of the same models with the usual names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.presets import named_plan
from mindspeed_fx.sharding.roles import read_roles
from tests.sharding import llama, mixtral
from tests.sharding.renamed import new_names, renamed


@pytest.fixture(scope="module")
def neutral():
    return {kind: renamed(module) for kind, module in (("dense", llama), ("experts", mixtral))}


def models(neutral, kind, **sizes):
    name = "Llama" if kind == "dense" else "Mixtral"
    usual = getattr(llama if kind == "dense" else mixtral, name)(**sizes).double()
    other = getattr(neutral[kind], name)(**sizes).double()
    names = new_names([n for n, _ in usual.named_parameters()])
    assert sorted(names.values()) == sorted(n for n, _ in other.named_parameters())
    assert not {w for n in names.values() for w in n.split(".")} & {"q_proj", "embed", "head", "experts", "down_proj"}
    other.load_state_dict({names[n]: p.detach().clone() for n, p in usual.named_parameters()}, strict=False)
    ids = torch.randint(0, 60, (4, 8))
    return usual, other, names, (ids, ids.roll(1, 1))


def check_equal(model, plan, sizes, args):
    """Loss and every gradient of one device; returns what ``simulate`` saw."""
    loss = model(*args)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    result = simulate(model, sizes, plan, *args)
    assert abs(result.outputs[0] - loss) <= 1e-9 * abs(loss)
    for (name, _), g in zip(model.named_parameters(), gradients):
        assert (result.gradients[name] - g).abs().max() <= 1e-9 * g.abs().max(), name
    return result


PLANS = [
    ("dense", "tp", {"tp": 2}),
    ("dense", "tp_sp", {"tp": 2}),
    ("experts", "ep", {"ep": 2}),
    ("experts", "ep_alltoall", {"ep": 2}),
    pytest.param("dense", "zero3", {"dp": 2}, marks=pytest.mark.slow),
    pytest.param("dense", "zero3+tp_sp", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
    pytest.param("experts", "zero3+ep", {"dp": 2, "ep": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kind,name,sizes", PLANS)
def test_neutral_names_have_the_plan_and_the_collectives_of_the_usual_ones(kind, name, sizes, neutral):
    torch.manual_seed(0)
    usual, other, names, args = models(neutral, kind, layers=1)
    expected = named_plan(name, usual)
    plan = named_plan(name, other, args=args)
    assert {n: plan.parameters.get(names[n]) for n in names} == {n: expected.parameters.get(n) for n in names}
    found = check_equal(other, plan, sizes, args)
    right = simulate(usual, sizes, expected, *args)
    assert (found.forward, found.backward) == (right.forward, right.backward)
    assert math.prod(sizes.values()) > 1 and sum(found.forward.values()) > 0


def test_without_arguments_neutral_names_say_nothing(neutral):
    _, other, _, _ = models(neutral, "experts", layers=1)
    with pytest.raises(ShardingError, match=r"give example arguments, args="):
        named_plan("ep", other)


class Tables(nn.Module):
    """Embeddings of tokens, of positions that are counted, of positions and kinds that are given; a tied output."""

    def __init__(self, tied=True):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Embedding(n, 16) for n in (48, 8, 8, 2))
        self.bias = nn.Embedding(6, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.last = nn.Linear(16, 48, bias=False)
        if tied:
            self.last.weight = self.a.weight

    def forward(self, ids, positions, kinds):
        counted = (ids != 0).cumsum(-1).clamp(max=7)
        far = torch.arange(ids.shape[1])[None].clamp(max=5)
        x = self.a(ids) + self.b(counted) + self.c(positions) + self.d(kinds) + self.bias(far)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.last(x).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_of_tokens_is_the_one_that_the_output_layer_matches(tied):
    torch.manual_seed(0)
    model = Tables(tied).double()
    args = torch.randint(1, 48, (2, 8)), torch.arange(8)[None].repeat(2, 1), torch.ones(2, 8, dtype=torch.long)
    roles = read_roles(model, args)
    assert roles.embeddings == ["a.weight"]
    assert roles.output_layers == (["a.weight"] if tied else ["last.weight"])
    plan = named_plan("tp", model, args=args)
    assert plan.parameters["a.weight"] == {"tp": "S(0)"}
    assert not {"b.weight", "c.weight", "d.weight", "bias.weight"} & set(plan.parameters)
    check_equal(model, plan, {"tp": 2}, args)


class Einsums(nn.Module):
    """Attention and a feed-forward part whose projections are einsums; heads have a dimension of their own."""

    def __init__(self, width=16, heads=4, packed=False):
        super().__init__()
        self.packed = packed
        if packed:
            self.p = nn.Parameter(torch.randn(width, 3, heads, width // heads) / 4)
        else:
            self.p, self.q, self.r = (nn.Parameter(torch.randn(width, heads, width // heads) / 4) for _ in range(3))
        self.s = nn.Parameter(torch.randn(heads, width // heads, width) / 4)
        self.u, self.w = nn.Parameter(torch.randn(32, width) / 4), nn.Parameter(torch.randn(32, width) / 4)

    def forward(self, x):
        if self.packed:
            q, k, v = torch.einsum("bsh,hcnd->cbnsd", x, self.p).unbind(0)
        else:
            q, k, v = (torch.einsum("bsh,hnd->bnsd", x, w) for w in (self.p, self.q, self.r))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + torch.einsum("bnsd,ndh->bsh", out, self.s)
        x = x + torch.einsum("bsf,fh->bsh", F.gelu(torch.einsum("fh,bsh->bsf", self.u, x)), self.w)
        return x.square().mean()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["tp", "tp_sp"])
def test_einsums_are_columns_and_rows(packed, name):
    torch.manual_seed(0)
    model, x = Einsums(packed=packed).double(), torch.randn(2, 8, 16, dtype=torch.float64)
    roles = read_roles(model, (x,))
    heads = {"p": 2} if packed else dict.fromkeys("pqr", 1)
    assert (roles.columns, roles.rows, roles.whole) == ({**heads, "u": 0}, {"s": 0, "w": 0}, {})
    result = check_equal(model, named_plan(name, model, args=(x,)), {"tp": 2}, (x,))
    if name == "tp":
        assert result.forward == {"all_reduce": 2}


class Stacked(nn.Module):
    """Experts as products of a batch of matrices, all tokens for each expert, weighed by what was chosen."""

    def __init__(self, width=16, experts=4):
        super().__init__()
        self.r, self.lin = nn.Linear(width, experts), nn.Linear(width, width)
        self.m, self.n = (
            nn.Parameter(torch.randn(experts, width, 24) / 4),
            nn.Parameter(torch.randn(experts, 24, width) / 4),
        )

    def forward(self, x):
        tokens = self.lin(x).flatten(0, 1)
        weights, chosen = torch.topk(self.r(tokens).softmax(-1), 2)
        share = torch.zeros_like(self.r(tokens)).scatter(1, chosen, weights)
        rows = tokens.expand(self.m.shape[0], *tokens.shape)
        out = torch.bmm(F.silu(torch.bmm(rows, self.m)), self.n)
        return (out * share.t().unsqueeze(-1)).sum(0).square().mean()


def test_stacked_experts_are_read_from_their_products():
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    assert read_roles(Stacked().double(), (x,)).experts == ["m", "n"]


def test_a_matrix_for_each_head_is_no_expert():
    class Heads(Stacked):
        def forward(self, x):
            rows = self.lin(x).flatten(0, 1).expand(4, 16, 16)
            return torch.bmm(torch.bmm(rows, self.m), self.n).square().mean()

    assert read_roles(Heads().double(), (torch.randn(2, 8, 16, dtype=torch.float64),)).experts == []
