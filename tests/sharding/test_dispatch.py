"""Plan ``ep_alltoall``: tokens travel to experts on other ranks and back; equal to one device, and what is sent."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mindspeed_fx  # noqa: F401  registers the operators
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from mindspeed_fx.sharding.spmd.token_dispatch import _gathers

ops = torch.ops.mindspeed
EXPERTS, CHOSEN, HIDDEN, WIDE = 4, 2, 6, 4


def counted(chosen):
    return torch.histc(chosen.flatten().double(), bins=EXPERTS, min=0, max=EXPERTS - 1)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (
            torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE, dtype=torch.float64) / 2) for _ in range(2)
        )
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN, dtype=torch.float64) / 2)

    def forward(self, x, chosen, weights):
        rows, order = ops.moe_permute(x, chosen)
        ends = counted(chosen).cumsum(0).to(torch.int32)
        inner = torch.nn.functional.silu(ops.grouped_matmul(rows, self.gate, ends)) * ops.grouped_matmul(
            rows, self.up, ends
        )
        return ops.moe_unpermute(ops.grouped_matmul(inner, self.down, ends), order, weights)


class Mixture(torch.nn.Module):
    """With a router whose favourite is one expert, so that ranks get unequal shares and some expert none."""

    def __init__(self, favourite: float = 0.0):
        super().__init__()
        self.embed, self.router, self.experts = (
            torch.nn.Embedding(32, HIDDEN).double(),
            torch.nn.Linear(HIDDEN, EXPERTS).double(),
            Experts(),
        )
        with torch.no_grad():
            self.router.bias[1] += favourite

    def forward(self, ids):
        x = self.embed(ids)
        weights, chosen = self.router(x.flatten(0, 1)).softmax(-1).topk(CHOSEN)
        return (x + self.experts(x.flatten(0, 1), chosen, weights).view(x.shape)).square().mean()


def checked(model, mesh, plan, ids=None, bound=1e-10):
    ids = torch.randint(0, 32, (4, 6)) if ids is None else ids
    model.zero_grad()
    loss = model(ids)
    loss.backward()
    result = simulate(model, mesh, plan, ids)
    assert (result.outputs[0] - loss).abs() <= 1e-10 * loss.abs()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0, name
        assert (result.gradients[name] - p.grad).abs().max() <= bound * p.grad.abs().max(), name
    return result


BOTH = Plan(
    "both",
    ("ep", "tp"),
    {f"experts.{n}": {"ep": "S(0)", "tp": "S(0)"} for n in ("gate", "up", "down")},
    {"*": {"ep": "S(0)"}},
    {"experts": Boundary({"tp": "R"}, {"tp": "R"})},
    experts={"dispatch": "all_to_all"},
)
"""TP-extends-EP: experts divided over tokens' dimension and over one on which tokens are whole."""


@pytest.mark.parametrize(
    "mesh,plan,favourite",
    [
        ({"ep": 2}, "ep_alltoall", 0.0),
        ({"ep": 4}, "ep_alltoall", 9.0),
        ({"dp": 2, "ep": 2}, "zero2+ep_alltoall", 0.0),
        ({"ep": 2, "tp": 2}, BOTH, 9.0),
    ],
)
def test_equals_one_device(mesh, plan, favourite):
    """One exchange of counts, and one of rows each way; back the same two."""
    result = checked(Mixture(favourite), mesh, plan)
    assert result.forward["all_to_all_single"] == 3 and result.backward["all_to_all_single"] == 2, (
        result.forward,
        result.backward,
    )
    assert not result.forward["all_gather_into_tensor"] or plan != "ep_alltoall"


def test_fixed_splits():
    model = Mixture()
    plan = dataclasses.replace(named_plan("ep_alltoall", model), experts={"dispatch": "all_to_all", "capacity": 2.0})
    assert Plan.from_dict(plan.as_dict()).as_dict() == plan.as_dict()
    checked(model, {"ep": 2}, plan)


def test_more_than_the_capacity_is_an_error():
    model = Mixture(99.0)
    plan = dataclasses.replace(named_plan("ep_alltoall", model), experts={"dispatch": "all_to_all", "capacity": 1})
    with pytest.raises(Exception, match="capacity of 1 has room for"):
        simulate(model, {"ep": 4}, plan, torch.zeros(4, 6, dtype=torch.long))


def test_weights_gathered_by_expert():
    """Rows go back to the order of tokens between the two products, so that each has an exchange of its own."""
    from tests.sharding.test_experts import Mixture as Gathered

    result = checked(Gathered(), {"ep": 2}, "ep_alltoall")
    assert result.forward["all_to_all_single"] == 6


class CappedExperts(torch.nn.Module):
    """One weight for gate and up, and an activation that no fused operator has."""

    def __init__(self):
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * WIDE, dtype=torch.float64) / 2)
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN, dtype=torch.float64) / 2)

    def forward(self, x, chosen, weights):
        rows, order = ops.moe_permute(x, chosen)
        ends = counted(chosen).cumsum(0).to(torch.int32)
        gate, up = ops.grouped_matmul(rows, self.gate_up, ends).chunk(2, -1)
        inner = torch.tanh(gate.abs().log1p()) * torch.nn.functional.softplus(up)
        return ops.moe_unpermute(ops.grouped_matmul(inner, self.down, ends), order, weights)


@pytest.mark.parametrize("plan, collective, count", [("ep_alltoall", "all_to_all_single", 3), ("ep", "all_reduce", 1)])
def test_any_activation_is_computed_of_own_rows(plan, collective, count):
    model = Mixture()
    model.experts = CappedExperts()
    assert checked(model, {"ep": 2}, plan).forward[collective] == count


class BiasedExperts(Experts):
    """GPT-OSS's as transformers sorts them: each row gets the biases of its expert, which are narrower than it."""

    def __init__(self):
        super().__init__()
        self.gate_bias, self.down_bias = (
            torch.nn.Parameter(torch.randn(EXPERTS, width).to(torch.float32)) for width in (WIDE, HIDDEN)
        )

    def forward(self, x, chosen, weights):
        rows, order = ops.moe_permute(x, chosen)
        expert = torch.sort(chosen.flatten())[0]
        ends = counted(chosen).cumsum(0).to(torch.int32)
        inner = ops.grouped_matmul(rows, self.gate, ends)
        inner.add_(self.gate_bias[expert])
        inner = torch.nn.functional.silu(inner) * ops.grouped_matmul(rows, self.up, ends)
        expert = chosen.flatten()[chosen.flatten().argsort(stable=True)]
        out = ops.grouped_matmul(inner, self.down, ends) + self.down_bias[expert].to(rows.dtype)
        return ops.moe_unpermute(out, order, weights)


DIVIDED_BIASES = dataclasses.replace(
    BOTH, parameters={**BOTH.parameters, "experts.gate_bias": {"ep": "S(0)"}, "experts.down_bias": {"tp": "S(1)"}}
)


WHOLE_BEHIND = dataclasses.replace(
    BOTH, parameters={f"experts.{n}": {"ep": "S(0)", "tp": "S(0)"} for n in ("gate", "up")}
)


@pytest.mark.parametrize("mesh, plan", [
    ({"ep": 2}, "ep_alltoall"),
    ({"dp": 2, "ep": 2}, "zero2+ep_alltoall"),
    ({"ep": 2, "tp": 2}, BOTH),
    ({"ep": 2, "tp": 2}, DIVIDED_BIASES),
    ({"ep": 2, "tp": 2}, WHOLE_BEHIND),
])  # fmt: skip
def test_rows_of_a_table_by_expert_go_to_the_rows_that_were_sent(mesh, plan):
    """No more is sent than without them; their gradients are float32's."""
    model = Mixture(3.0)
    model.experts = BiasedExperts()
    result = checked(model, mesh, plan, bound=1e-6)
    assert result.forward["all_to_all_single"] == 3 and result.backward["all_to_all_single"] == 2


class Descending(Mixture):
    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        chosen = self.router(x).topk(CHOSEN)[1]
        rows, order = ops.moe_permute(x, chosen)
        expert = torch.sort(chosen.flatten(), descending=True)[0]
        rows = ops.grouped_matmul(rows, self.experts.gate, counted(chosen).cumsum(0))
        return ops.moe_unpermute(rows + self.router.bias.unsqueeze(1)[expert], order, None, CHOSEN).mean()


class RowExperts(Experts):
    """A module of experts that gets rows, sorted already."""

    def forward(self, rows, ends):
        inner = torch.nn.functional.silu(ops.grouped_matmul(rows, self.gate, ends))
        return ops.grouped_matmul(inner * ops.grouped_matmul(rows, self.up, ends), self.down, ends)


class SortedBefore(Mixture):
    """torchtitan's, whose rows are multiplied by their weights before the experts, or behind them."""

    def __init__(self, before):
        super().__init__()
        self.experts, self.before = RowExperts(), before
        self.up_proj, self.down_proj = torch.nn.Linear(HIDDEN, 8).double(), torch.nn.Linear(8, HIDDEN).double()

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.down_proj(self.up_proj(x).relu())
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(CHOSEN)
        order = torch.argsort(chosen.view(-1), stable=True)
        tokens, share = order // CHOSEN, weights.view(-1)[order].unsqueeze(-1)
        ends = counted(chosen).cumsum(0).to(torch.int32)
        if self.before:
            y = self.experts(flat[tokens] * share, ends)
        else:
            y = self.experts(flat[tokens], ends) * share
        out = torch.zeros_like(flat).scatter_add(0, tokens.unsqueeze(-1).expand(-1, HIDDEN), y)
        return (x + out.view(x.shape)).square().mean()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("mesh, plan", [
    ({"ep": 2, "tp": 2}, "ep_alltoall+tp_sp"),
    pytest.param({"ep": 2, "tp": 2}, "ep_alltoall+tp", marks=pytest.mark.slow),
    pytest.param({"ep": 2}, "ep_alltoall", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_module_that_gets_sorted_rows(mesh, plan, before):
    """The plan's edges of the module are those of the tokens; as many exchanges as without."""
    result = checked(SortedBefore(before), mesh, plan)
    assert result.forward["all_to_all_single"] == 3, result.forward


class Uncounted(Mixture):
    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        rows, order = ops.moe_permute(x, self.router(x).topk(CHOSEN)[1])
        ends = torch.arange(1, EXPERTS + 1) * (rows.shape[0] // EXPERTS)
        return ops.moe_unpermute(
            ops.grouped_matmul(ops.grouped_matmul(rows, self.experts.gate, ends), self.experts.down, ends),
            order,
            None,
            CHOSEN,
        ).mean()


class Summed(Mixture):
    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        chosen = self.router(x).topk(CHOSEN)[1]
        rows, _ = ops.moe_permute(x, chosen)
        return ops.grouped_matmul(rows, self.experts.gate, counted(chosen).cumsum(0)).mean()


@pytest.mark.parametrize(
    "model,says",
    [
        (Uncounted, "where the rows of each expert end is not counted from the choices that sort them"),
        (Summed, "mean.default reads rows that are sorted by expert"),
        (Descending, "a value of (48, 1) meets rows that were sent to their experts, and was not sent with them"),
    ],
)
def test_what_cannot_be_sent_says_why(model, says):
    with pytest.raises(Exception) as error:
        simulate(model(), {"ep": 2}, "ep_alltoall", torch.zeros(4, 6, dtype=torch.long))
    assert says in str(error.value) and 'plan "ep" gathers tokens instead' in str(error.value)


@pytest.mark.parametrize("experts,says", [
    ({"dispatch": "alltoall"}, 'did you mean "all_to_all"?'), ({"dispach": "all_to_all"}, 'unknown key "dispach" (did '
                                                                                          'you mean "dispatch"?)'),
    ({"dispatch": "all_to_all", "capacity": 0.5}, "a number from 1 on"), ({"capacity": 2}, "with dispatch: all_to_all"),
])  # fmt: skip
def test_wrong_words(experts, says):
    with pytest.raises(ShardingError) as error:
        Plan("mine", ("ep",), experts=experts)
    assert says in str(error.value)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.randoms(), st.integers(0, 2))
def test_runs_of_rows_go_there_and_back(lengths, chance, room):
    """Runs in any order to places in order, with room behind each."""
    order = list(range(len(lengths)))
    chance.shuffle(order)
    starts, bases, at = [0] * len(lengths), [], 0
    for g in order:
        starts[g], at = at, at + lengths[g]
    rows, places = at, 0
    for n in lengths:
        bases, places = [*bases, places], places + n + room
    tables = _gathers(*(torch.tensor(x) for x in (starts, lengths, bases)), rows, places, ordered=False)
    expected = {bases[g] + i: starts[g] + i for g, n in enumerate(lengths) for i in range(n)}
    row, has, place, goes = (t.tolist() for t in tables)
    assert {p: row[p] for p in range(places) if has[p]} == expected
    assert {p: r for r, p in enumerate(place) if goes[r]} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, implementation, mesh, plan",
    [
        ("Mixtral", "grouped_mm", {"ep": 2}, "ep_alltoall"),
        ("Qwen3Moe", "batched_mm", {"ep": 4}, "ep_alltoall"),
        ("GptOss", "grouped_mm", {"ep": 2}, "ep_alltoall"),
        ("GptOss", "grouped_mm", {"ep": 2, "tp": 2}, "ep_alltoall+tp"),
        ("Mixtral", "grouped_mm", {"dp": 2, "ep": 2}, "zero2+ep_alltoall"),
        ("Mixtral", "grouped_mm", {"ep": 2, "tp": 2}, "ep_alltoall+tp"),
        ("Mixtral", "grouped_mm", {"ep": 2, "tp": 2}, "ep_alltoall+tp_sp"),
    ],
)
def test_hugging_face(kind, implementation, mesh, plan):
    from tests.sharding.test_experts import checked, hugging_face

    result = checked(hugging_face(kind, implementation), mesh, plan, torch.randint(0, 32, (4, 8)))
    if implementation == "grouped_mm":
        assert result.forward["all_to_all_single"] == 3 and result.backward["all_to_all_single"] == 2
