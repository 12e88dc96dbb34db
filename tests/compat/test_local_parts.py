"""A rank's part of a DTensor and the gradients that come back to it."""

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mindspeed_fx.compat import dtensor, local_parts


class Unread(torch.autograd.Function):
    """The identity, of which no gradient comes back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_gradient_that_is_missing_passes_a_redistribution():
    """As of a router's scores that choose experts and scale nothing (Phi-MoE); torch's own fails on zeros."""
    local_parts.leave_missing_gradients()
    with dtensor.all_ranks({"a": 2}) as mesh:
        x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        moved = x.redistribute(placements=[Replicate()])
        (gradient,) = torch.autograd.grad((Unread.apply(moved) + 1).sum() + x.sum(), x)
        assert torch.equal(gradient.full_tensor().reconcile(), torch.ones(4, 3))
        (gradient,) = torch.autograd.grad(moved.square().sum(), x)
        assert torch.equal(gradient.full_tensor().reconcile(), 2 * x.detach().full_tensor().reconcile())
