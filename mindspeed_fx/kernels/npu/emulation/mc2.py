"""CPU kernels of torch_npu's operators that multiply and communicate in one. ``hcom`` is the name of a process group
here.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives  # noqa: F401  registers the operators

from mindspeed_fx.kernels.npu.emulation.registry import emulation

c10d = torch.ops._c10d_functional


def _fake_gather(input, x2, hcom, world_size, *, gather_output=True, **more):
    out = input.new_empty(input.shape[0] * world_size, x2.shape[1])
    return out, input.new_empty(input.shape[0] * world_size, input.shape[1]) if gather_output else input.new_empty(0)


@emulation("npu_all_gather_base_mm", _fake_gather)
def npu_all_gather_base_mm(input, x2, hcom, world_size, *, bias=None, gather_output=True, **more):
    """(all ranks' rows of ``input`` times ``x2``, those rows, rank by rank); the second is empty without
    ``gather_output``.
    """
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(input.contiguous(), world_size, hcom))
    return whole @ x2, whole if gather_output else input.new_empty(0)


@emulation(
    "npu_mm_reduce_scatter_base",
    lambda input, x2, hcom, world_size, **more: input.new_empty(input.shape[0] // world_size, x2.shape[1]),
)
def npu_mm_reduce_scatter_base(input, x2, hcom, world_size, *, reduce_op="sum", bias=None, **more):
    """This rank's rows of the sum over ranks of ``input`` times ``x2``."""
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(input @ x2, reduce_op, world_size, hcom))


@emulation("npu_mm_all_reduce_base", lambda x1, x2, hcom, **more: x1.new_empty(*x1.shape[:-1], x2.shape[1]))
def npu_mm_all_reduce_base(x1, x2, hcom, *, reduce_op="sum", bias=None, x3=None, **more):
    """The sum over ranks of ``x1`` times ``x2`` plus ``bias``, and ``x3`` once."""
    out = x1 @ x2 if bias is None else x1 @ x2 + bias
    total = c10d.wait_tensor(c10d.all_reduce(out, reduce_op, hcom))
    return total if x3 is None else total + x3


def _width(weight, transposed):
    return weight.shape[1 if transposed else 2]


def _fake_dispatch(
    gmm_x,
    gmm_weight,
    hcom,
    ep_world_size,
    send_counts,
    recv_counts,
    *,
    trans_gmm_weight=False,
    permute_out_flag=False,
    **more,
):
    rows = sum(recv_counts)
    return (
        gmm_x.new_empty(rows, _width(gmm_weight, trans_gmm_weight)),
        gmm_x.new_empty(0),
        gmm_x.new_empty(rows, gmm_x.shape[1]) if permute_out_flag else gmm_x.new_empty(0),
    )


def _exchange(x, sent, received, hcom, ranks):
    """Rows of all ranks for this one, rank by rank; counts [ranks, experts]."""
    totals = [
        [sum(counts[i * len(counts) // ranks : (i + 1) * len(counts) // ranks]) for i in range(ranks)]
        for counts in (received, sent)
    ]
    return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), *totals, hcom))


def _products(parts, weight, transposed):
    return torch.cat([x @ (w.t() if transposed else w) for x, w in zip(parts, weight)])


@emulation("npu_alltoallv_gmm", _fake_dispatch)
def npu_alltoallv_gmm(
    gmm_x,
    gmm_weight,
    hcom,
    ep_world_size,
    send_counts,
    recv_counts,
    *,
    trans_gmm_weight=False,
    permute_out_flag=False,
    **more,
):
    """(rows received, by expert and of one expert by rank, times the expert's matrix, nothing, those rows); the last
    empty unless asked for.
    """
    experts = gmm_weight.shape[0]
    blocks = _exchange(gmm_x, send_counts, recv_counts, hcom, ep_world_size).split(list(recv_counts))
    parts = [torch.cat(blocks[j::experts]) for j in range(experts)]
    return (
        _products(parts, gmm_weight, trans_gmm_weight),
        gmm_x.new_empty(0),
        torch.cat(parts) if permute_out_flag else gmm_x.new_empty(0),
    )


@emulation("npu_gmm_alltoallv", lambda *args, **more: _fake_dispatch(*args, **more)[:2])
def npu_gmm_alltoallv(
    gmm_x, gmm_weight, hcom, ep_world_size, send_counts, recv_counts, *, trans_gmm_weight=False, **more
):
    """(rows by expert, of one expert by rank, times the expert's matrix, sent to their ranks; nothing)."""
    experts = gmm_weight.shape[0]
    of_experts = [list(send_counts[j::experts]) for j in range(experts)]
    y = _products(gmm_x.split([sum(c) for c in of_experts]), gmm_weight, trans_gmm_weight)
    blocks = y.split([n for c in of_experts for n in c])
    by_rank = torch.cat([blocks[j * ep_world_size + i] for i in range(ep_world_size) for j in range(experts)])
    return _exchange(by_rank, send_counts, recv_counts, hcom, ep_world_size), gmm_x.new_empty(0)
