"""An all-to-all of equal parts whose start and whose wait are two functions, so that a program can compute between.

The gradient of :func:`wait` starts the exchange back, and that of :func:`begin` waits for it: what stands between start
and wait in the forward stands between them in the backward, in the opposite order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.megatron.groups import size

calls = torch.ops._c10d_functional


def begin(x: Tensor, group: Any) -> Tensor:
    """What an all-to-all over ``group`` will have made of ``x`` [ranks * n, ...] when :func:`wait` has returned it:
    rank r gets the r-th part of every rank, [ranks * n, ...].
    """
    return x if size(group) == 1 else _Begin.apply(x, group)


def wait(x: Tensor, group: Any) -> Tensor:
    """The result of :func:`begin` over the same ``group``."""
    return x if size(group) == 1 else _Wait.apply(x, group)


def _start(x: Tensor, group: Any) -> Tensor:
    splits = [x.shape[0] // size(group)] * size(group)
    return calls.all_to_all_single(x.contiguous(), splits, splits, group.group_name)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _start(x, group)

    @staticmethod
    def backward(ctx, grad):
        return calls.wait_tensor(grad), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return calls.wait_tensor(x)

    @staticmethod
    def backward(ctx, grad):
        return _start(grad, ctx.group), None
