"""Every named plan on all ranks in one process: loss and every gradient of the single device, and no collective too
many.
"""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Boundary, Plan, ShardingError
from mindspeed_fx.sharding.presets import named_plan
from tests.sharding.llama import Llama

LAYERS, NORMS, PARAMETERS = 2, 5, 21


def batch(rows=4, seq=16):
    return torch.randint(0, 64, (rows, seq)), torch.randint(0, 64, (rows, seq))


def checked(model, mesh, plan, *args, tolerance=1e-10):
    """The simulation, after comparing it with the model on one device."""
    loss = model(*args)
    model.zero_grad()
    loss.backward()
    result = simulate(model, mesh, plan, *args)
    assert (result.outputs[0] - loss).abs() <= tolerance * loss.abs()
    expected = {n: p.grad for n, p in model.named_parameters()}
    assert result.gradients.keys() == expected.keys(), "a gradient appeared or disappeared"
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        assert (result.gradients[name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name
    return result


COUNTS = {
    # Per layer and direction two all-reduces; forward also the embedding's and the cross-entropy's two, backward the
    # head's.
    "tp": ({"tp": 2}, {"all_reduce": 2 * LAYERS + 3}, {"all_reduce": 2 * LAYERS + 1}),
    # Each all-reduce of activations becomes a reduce-scatter and an all-gather; the norms' gradients are summed.
    "tp_sp": (
        {"tp": 4},
        {"reduce_scatter_tensor": 2 * LAYERS + 1, "all_gather_into_tensor": 2 * LAYERS + 1, "all_reduce": 2},
        {"reduce_scatter_tensor": 2 * LAYERS + 1, "all_gather_into_tensor": 2 * LAYERS + 1, "all_reduce": NORMS},
    ),
    # q, k, v and the result of attention; forward the loss and its count, backward every parameter.
    "ulysses": (
        {"cp": 2},
        {"all_to_all_single": 4 * LAYERS, "all_reduce": 2},
        {"all_to_all_single": 4 * LAYERS, "all_reduce": PARAMETERS},
    ),
    # Keys and values are gathered, their gradients scattered.
    "kv_allgather": (
        {"cp": 2},
        {"all_gather_into_tensor": 2 * LAYERS, "all_reduce": 2},
        {"reduce_scatter_tensor": 2 * LAYERS, "all_reduce": PARAMETERS},
    ),
    # Keys and values once round, less one; to chunks that balance and back. In the backward their gradients go round
    # too, one step more.
    "ring": (
        {"cp": 4},
        {"all_to_all_single": (3 + 2) * LAYERS, "all_reduce": 2},
        {"all_to_all_single": (3 + 4 + 2) * LAYERS, "all_reduce": PARAMETERS},
    ),
    "zero1": ({"dp": 2}, {"all_gather_into_tensor": PARAMETERS, "all_reduce": 2}, {"all_reduce": PARAMETERS}),
    "zero2": (
        {"dp": 4},
        {"all_gather_into_tensor": PARAMETERS, "all_reduce": 2},
        {"reduce_scatter_tensor": PARAMETERS},
    ),
}


@pytest.mark.parametrize("plan", COUNTS)
def test_plan_equals_one_device_with_the_fewest_collectives(plan):
    mesh, forward, backward = COUNTS[plan]
    result = checked(Llama(layers=LAYERS).double(), mesh, plan, *batch())
    assert dict(result.forward) == forward
    assert dict(result.backward) == backward


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan,mesh",
    [
        ("zero3+tp_sp", {"dp": 2, "tp": 2}),
        ("zero2+ulysses", {"dp": 2, "cp": 2}),
        ("ulysses+tp", {"cp": 2, "tp": 2}),
        ("zero1+kv_allgather+tp", {"dp": 2, "cp": 2, "tp": 2}),
        ("tp_2d", {"tp_x": 2, "tp_y": 2}),
        ("zero3+tp_2d", {"dp": 2, "tp_x": 2, "tp_y": 2}),
        ("tp_sp", {"tp": 1}),
        ("ulysses", {"cp": 4}),
        ("ring", {"cp": 2}),
        ("ring", {"cp": 1}),
        ("zero2+ring+tp", {"dp": 2, "cp": 2, "tp": 2}),
        ("hybrid", {"cp_ring": 2, "cp_ulysses": 2}),
    ],
)
def test_combinations(plan, mesh):
    checked(Llama().double(), mesh, plan, *batch())


@pytest.mark.parametrize("variant", [{"bias": True}, {"tied": True}, {"kv_heads": 2}, {"kv_heads": 1}])
def test_variants_of_the_model(variant):
    checked(
        Llama(layers=1, **variant).double(),
        {"tp": 2},
        "tp_sp" if variant != {"kv_heads": 1} else "kv_allgather",
        *batch(),
    ) if variant != {"kv_heads": 1} else checked(
        Llama(layers=1, **variant).double(), {"cp": 2}, "kv_allgather", *batch()
    )


def test_checkpointed_layers():
    model = Llama(layers=2).double()
    model.checkpointed = True
    checked(model, {"tp": 2}, "tp_sp", *batch())


def test_ignored_tokens_count_over_all_ranks():
    ids, labels = batch()
    labels[0] = -100
    checked(Llama(layers=1).double(), {"dp": 4}, "zero2", ids, labels)
    checked(Llama(layers=1).double(), {"tp": 2}, "tp", ids, labels)


@pytest.mark.parametrize("plan,mesh", [("tp", {"tp": 2}), pytest.param("zero2", {"dp": 2}, marks=pytest.mark.slow)])
def test_a_z_loss(plan, mesh):
    """Its gradient reaches a divided vocabulary, and divided tokens."""
    checked(Llama(layers=1, z_loss=0.1).double(), mesh, plan, *batch())


@pytest.mark.parametrize("plan,mesh,says", [
    ("tp", {"tp": 3}, 'parameter "embed.weight" of shape (64, 32): dimension 0 has 64 elements, which 3 ranks of "tp" '
                      'cannot share evenly'),
    ("zero2", {"dp": 3}, "3 ranks of \"dp\" cannot share evenly"),
    ("tp", {"dp": 2}, 'mesh dimension "tp" (did you mean "dp"?)'),
])  # fmt: skip
def test_sizes_that_do_not_fit(plan, mesh, says):
    with pytest.raises(Exception) as error:
        model = Llama(layers=1)
        simulate(model, mesh, named_plan(plan, model, strict=True), *batch())
    assert says in str(error.value)


def test_error_names_module_and_line():
    """Six heads on four ranks: the width divides, the heads do not."""
    with pytest.raises(ShardingError) as error:
        model = Llama(layers=1, hidden=48, heads=6, kv_heads=6)
        simulate(model, {"tp": 4}, named_plan("tp", model, strict=True), *batch())
    assert 'module "layers.0.attention"' in str(error.value) and "llama.py" in str(error.value)


def test_dropout_draws_what_one_device_draws():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8)).double()
    from mindspeed_fx.sharding.plan import Plan

    x = torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(3)
    expected = model(x)
    for placed in ("S(0)", "S(1)"):
        plan = Plan("rows", ("dp",), inputs={"*": {"dp": placed}})
        torch.manual_seed(3)
        out = simulate(model, {"dp": 2}, plan, x).outputs[0]
        assert math.isclose((out - expected).abs().max().item(), 0, abs_tol=1e-12)


def test_a_loss_that_looks_at_its_values_is_refused_by_name():
    """gaussian_nll_loss raises for negative variances: torch itself makes no graph of it."""

    class Model(torch.nn.Linear):
        def forward(self, x):
            h = super().forward(x)
            return torch.nn.functional.gaussian_nll_loss(h, x, h.square() + 0.1)

    with pytest.raises(ShardingError, match="takes a model that is one graph.*data-dependent"):
        simulate(Model(4, 4).double(), {"dp": 2}, "zero2", torch.randn(4, 4).double())


class Keeping(torch.nn.Module):
    """A recurrent model's way: what it keeps is no loss, unless it is what it returns."""

    def __init__(self, kept):
        super().__init__()
        self.linear, self.kept = torch.nn.Linear(4, 4, dtype=torch.float64), kept

    def forward(self, x):
        y = torch.dropout(self.linear(x), 0.3, True)
        loss = y.square().sum()
        self.last = loss if self.kept == "loss" else y[:, :2].exp() * 2
        return loss


@pytest.mark.parametrize("kept", ["loss", "state"])
def test_results_that_the_model_keeps(kept):
    """What they are is known after the step, which is made again then, and draws the same."""
    model, x = Keeping(kept), torch.randn(4, 4, dtype=torch.float64)
    torch.manual_seed(0)
    result = simulate(model, {"dp": 2}, "zero2", x)
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x), model.linear.weight)[0]
    torch.testing.assert_close(result.gradients["linear.weight"], expected)


class Unrolled(torch.nn.Module):
    """A recurrence beside divided layers: 2 ** 80 ways from its first value to its last, which meet no part."""

    def __init__(self):
        super().__init__()
        self.start, self.rate = (torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(2))
        self.up, self.down = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        state = self.start
        for _ in range(40):
            state = 0.1 * (state + torch.tanh(state * self.rate)) + state
        return self.down(torch.relu(self.up(x))).square().sum() + state.sum()


def test_gradients_of_a_recurrence_are_read_once_for_each_value():
    placed = {"up.weight": {"tp": "S(0)"}, "up.bias": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"}}
    modules = {"down": Boundary(output={"tp": "R"})}
    result = checked(
        Unrolled(), {"tp": 2}, Plan("mine", ("tp",), placed, modules=modules), torch.randn(4, 4, dtype=torch.float64)
    )
    assert result.backward.total() == 0
