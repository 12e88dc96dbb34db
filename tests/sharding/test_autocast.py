"""Mixed precision under plans: float32 weights, products in the lower precision where one device has them."""

from __future__ import annotations

import pytest
import torch

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.spmd.program import check_dtype
from tests.sharding.llama import Llama
from tests.sharding.mixtral import Mixtral

PLANS = [
    ("tp", {"tp": 2}),
    ("tp_sp", {"tp": 2}),
    ("tp_2d", {"tp_x": 2, "tp_y": 2}),
    ("ulysses", {"cp": 2}),
    ("kv_allgather", {"cp": 2}),
    ("ring", {"cp": 2}),
    ("hybrid", {"cp_ring": 2, "cp_ulysses": 2}),
    ("zero1", {"dp": 2}),
    ("zero2", {"dp": 2}),
    ("zero3", {"dp": 2}),
    ("ep", {"ep": 2}),
]
SLOW = ("tp", "tp_2d", "ulysses", "kv_allgather", "hybrid", "zero1", "zero3", "ep")


class Inside(torch.nn.Module):
    """Its own forward casts."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, *args):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.model(*args)


def gradients(model, args, dtype):
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = model(*args)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def worst(found, expected):
    return max(((found[n] - g).norm() / g.norm()).item() for n, g in expected.items())


@pytest.mark.parametrize(
    "plan,mesh", [pytest.param(p, m, marks=pytest.mark.slow) if p in SLOW else (p, m) for p, m in PLANS]
)
@pytest.mark.parametrize("inside,dtype", [
    (False, torch.bfloat16),
    pytest.param(True, torch.bfloat16, marks=pytest.mark.slow),
    pytest.param(False, torch.float16, marks=pytest.mark.slow),
])  # fmt: skip
def test_autocast_rounds_as_on_one_device(plan, mesh, inside, dtype):
    """As far from float32 as one device's autocast, twice at most; a cast that is lost is refused (below)."""
    model = (Mixtral if plan == "ep" else Llama)(1)
    args = torch.randint(0, 60, (4, 16)), torch.randint(0, 60, (4, 16))
    exact_loss, exact = gradients(model, args, torch.float32)
    loss, expected = gradients(model, args, dtype)
    assert loss != exact_loss, "autocast rounds nothing in this model"
    if inside:
        result = simulate(Inside(model, dtype), mesh, plan, *args)
        found = {n.removeprefix("model."): g for n, g in result.gradients.items()}
    else:
        with torch.autocast("cpu", dtype=dtype):
            result = simulate(model, mesh, plan, *args)
        found = result.gradients
    assert found.keys() == expected.keys() and {g.dtype for g in found.values()} == {torch.float32}
    assert result.outputs[0].dtype == loss.dtype
    assert (result.outputs[0] - loss).abs() <= 1e-3 * loss.abs()
    assert worst(found, exact) <= 2 * worst(expected, exact) + 1e-6


def test_a_lost_cast_is_refused():
    node = torch.fx.Graph().placeholder("x")
    node.meta["val"] = torch.empty(2, dtype=torch.bfloat16)
    check_dtype(node, torch.empty(2, dtype=torch.bfloat16))
    lost = pytest.raises(ShardingError, match="float32 in parts, and torch.bfloat16 on one device")
    with torch.autocast("cpu", dtype=torch.bfloat16), lost:
        check_dtype(node, torch.empty(2))
