"""Every rank passes its own part of the batch: the loss and the gradients of the whole batch on one device."""

from __future__ import annotations

import types

import pytest
import torch
from torch.distributed.tensor import Shard

from mindspeed_fx.planning.simulate import simulate
from mindspeed_fx.sharding.inputs import own_part
from tests.sharding.llama import Llama

PLANS = [
    ("zero1", {"dp": 2}),
    ("zero3", {"dp": 4}),
    ("tp_sp", {"tp": 2}),
    ("ulysses", {"cp": 2}),
    ("kv_allgather", {"cp": 2}),
    ("ring", {"cp": 2}),
    ("hybrid", {"cp_ring": 2, "cp_ulysses": 2}),
    ("zero2+ring", {"dp": 2, "cp": 2}),
    ("zero3+tp_sp", {"dp": 2, "tp": 2}),
]


FAST = ("zero3", "tp_sp", "zero2+ring")


@pytest.mark.parametrize("plan,mesh", [p if p[0] in FAST else pytest.param(*p, marks=pytest.mark.slow) for p in PLANS])
def test_parts_give_the_loss_of_the_whole_batch(plan, mesh):
    model = Llama(layers=1).double()
    batch = torch.randint(0, 64, (4, 16)), torch.randint(0, 64, (4, 16))
    loss = model(*batch)
    loss.backward()
    result = simulate(model, mesh, plan, *batch, local_inputs=True)
    assert (result.outputs[0] - loss).abs() <= 1e-10 * loss.abs()
    for name, p in model.named_parameters():
        assert p.grad.abs().max() > 0
        assert (result.gradients[name] - p.grad).abs().max() <= 1e-10 * p.grad.abs().max(), name


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_part_lies_in_memory_of_its_own(rank):
    """A view says where in the whole it lies, and as many bytes as are before its end: the compiler would be told, and
    ranks order their collectives otherwise."""
    mesh = types.SimpleNamespace(size=lambda i: 2, get_coordinate=lambda: (rank,))
    whole = torch.arange(24).reshape(4, 6)
    for dim in (0, 1):
        part = own_part(whole, [Shard(dim)], mesh)
        assert torch.equal(part, whole.chunk(2, dim)[rank])
        assert part.is_contiguous() and part.storage_offset() == 0
        assert part.untyped_storage().nbytes() == part.numel() * part.itemsize
