"""Collectives of equal parts whose start and whose wait are two functions, so that a program can compute between them.

The gradient of :func:`wait` starts the collective back, and that of :func:`begin` waits for it: what stands between
start and wait in the forward stands between them in the backward, in the opposite order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron.groups import size

EXCHANGE, GATHER, SCATTER = "exchange", "gather", "scatter"
BACK = {EXCHANGE: EXCHANGE, GATHER: SCATTER, SCATTER: GATHER}
"""The collective of the gradient."""


def begin(kind: str, x: Tensor, group: Any) -> Tensor:
    """What a collective over ``group`` will have made of ``x`` when :func:`wait` has returned it.

    Args:
        kind: ``EXCHANGE``: x [ranks * n, ...], of which rank r gets the r-th part of every rank, [ranks * n, ...];
            ``GATHER``: x [n, ...] of all ranks, [ranks * n, ...]; ``SCATTER``: the sum's own part, [n, ...].
    """
    return x if size(group) == 1 else _Begin.apply(x, kind, group)


def wait(x: Tensor, kind: str, group: Any) -> Tensor:
    """The result of :func:`begin`, of the same ``kind`` and ``group``."""
    return x if size(group) == 1 else _Wait.apply(x, kind, group)


def _start(kind: str, x: Tensor, group: Any) -> Tensor:
    calls, ranks, x = torch.ops._c10d_functional, size(group), x.contiguous()
    if kind == GATHER:
        return calls.all_gather_into_tensor(x, ranks, group.group_name)
    if kind == SCATTER:
        return calls.reduce_scatter_tensor(x, "sum", ranks, group.group_name)
    splits = [x.shape[0] // ranks] * ranks
    return calls.all_to_all_single(x, splits, splits, group.group_name)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, group):
        return _start(kind, x, group)

    @staticmethod
    def backward(ctx, grad):
        return torch.ops._c10d_functional.wait_tensor(grad), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, group):
        ctx.kind, ctx.group = kind, group
        return torch.ops._c10d_functional.wait_tensor(x)

    @staticmethod
    def backward(ctx, grad):
        return _start(BACK[ctx.kind], grad, ctx.group), None, None
