"""CPU kernels of torch_npu's operators that multiply and communicate in one. ``hcom`` is the name of a process group here."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives  # noqa: F401  registers the operators

from mindspeed_fx.kernels.npu.emulate import emulation

c10d = torch.ops._c10d_functional


def _fake_gather(input, x2, hcom, world_size, *, gather_output=True, **more):
    out = input.new_empty(input.shape[0] * world_size, x2.shape[1])
    return out, input.new_empty(input.shape[0] * world_size, input.shape[1]) if gather_output else input.new_empty(0)


@emulation("npu_all_gather_base_mm", _fake_gather)
def npu_all_gather_base_mm(input, x2, hcom, world_size, *, bias=None, gather_output=True, **more):
    """(all ranks' rows of ``input`` times ``x2``, those rows, rank by rank); the second is empty without ``gather_output``."""
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(input.contiguous(), world_size, hcom))
    return whole @ x2, whole if gather_output else input.new_empty(0)


@emulation("npu_mm_reduce_scatter_base", lambda input, x2, hcom, world_size, **more: input.new_empty(input.shape[0] // world_size, x2.shape[1]))
def npu_mm_reduce_scatter_base(input, x2, hcom, world_size, *, reduce_op="sum", bias=None, **more):
    """This rank's rows of the sum over ranks of ``input`` times ``x2``."""
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(input @ x2, reduce_op, world_size, hcom))


@emulation("npu_mm_all_reduce_base", lambda x1, x2, hcom, **more: x1.new_empty(*x1.shape[:-1], x2.shape[1]))
def npu_mm_all_reduce_base(x1, x2, hcom, *, reduce_op="sum", bias=None, **more):
    """The sum over ranks of ``x1`` times ``x2``."""
    return c10d.wait_tensor(c10d.all_reduce(x1 @ x2, reduce_op, hcom))
