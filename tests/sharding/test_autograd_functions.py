"""Functions with a backward of their own under plans: forward and backward run by the rules of any operator."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mindspeed_fx.compat import dtensor
from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.plan import Plan
from mindspeed_fx.sharding.spmd import aten_rules
from tests.sharding.estimated import PLACEMENTS, Routed


@pytest.mark.parametrize(
    "plan, mesh",
    [
        *((Plan(name, ("tp",), placed), {"tp": 2}) for name, placed in PLACEMENTS.items()),
        ("ulysses", {"cp": 2}),
        ("zero2", {"dp": 2}),
    ],
)
def test_equals_one_device(plan, mesh):
    model, ids = Routed().double(), torch.randint(0, 32, (4, 16))
    model(ids).backward()
    result = simulate(model, mesh, plan, ids)
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0
        torch.testing.assert_close(result.gradients[name], p.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial(), Replicate()])
@pytest.mark.parametrize("write", [
    lambda run, x, at, y: run(torch.ops.aten.scatter_add_.default, (x, 1, at, y), {}),
    lambda run, x, at, y: run(torch.ops.aten.index_add_.default, (x, 0, at[:, 0], y), {}),
    lambda run, x, at, y: run(torch.ops.aten.cumsum_.default, (x, 0), {}),
    lambda run, x, at, y: run(torch.ops.aten.mul_.Tensor, (x, y), {}),
    lambda run, x, at, y: run(torch.ops.aten.add_.Tensor, (x, 1.0), {}),
    lambda run, x, at, y: run(torch.ops.aten.add_.Tensor, (x, x), {}),
    lambda run, x, at, y: run(torch.ops.aten.zero_.default, (x,), {}),
], ids=["scatter_add_", "index_add_", "cumsum_", "mul_", "add_", "add_ itself", "zero_"])  # fmt: skip
def test_writes_in_place(write, placement):
    """What is written is seen through the argument, whatever its placement."""
    x, y, at = torch.randn(4, 4), torch.randn(4, 4), torch.stack([torch.randperm(4) for _ in range(4)])
    expected = x.clone()
    write(lambda target, args, kwargs: target(*args, **kwargs), expected, at, y)
    with dtensor.all_ranks({"a": 2}) as mesh:
        whole = lambda t: distribute_tensor(dtensor.on_every_rank(t), mesh, [Replicate()], src_data_rank=None)
        given = whole(x).redistribute(placements=[placement]) if placement.is_shard() else whole(x)
        if placement.is_partial():
            given = DTensor.from_local(given.to_local() / 2, mesh, [placement], run_check=False)
        write(aten_rules.run, given, whole(at), whole(y))
        assert given.placements == (placement,)
        torch.testing.assert_close(given.full_tensor().reconcile(), expected)
