"""Mixture of experts on NPU: grouped matrix products and the permutation of tokens.

``npu_grouped_matmul`` has no gradient in torch_npu; its backward is two more of them. It leaves rows without a group
undefined, which the operator has at zero. The permutation's indices are int32 there and int64 here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.kernels.grouped_matmul import grouped_matmul, grouped_matmul_backward
from mindspeed_fx.kernels.npu import check_types, dense_order, first, lowering, within

npu = torch.ops.npu

INNER = 65535
"""Largest last dimension of a factor: "less than 65536"."""


# --------------------------------------------------------------------------- grouped matrix product


def _supports_grouped(x, weight, offsets, zero_tail=True):
    op = "npu_grouped_matmul"
    return first(
        check_types(x=x, weight=weight),
        f"{op}: x is {x.dtype}, weight {weight.dtype}; valid: one type".replace("torch.", "")
        if x.dtype != weight.dtype
        else None,
        within(f"{op}: groups", weight.shape[0], 2, 1024),
        within(f"{op}: k", weight.shape[1], 1, INNER),
        within(f"{op}: n", weight.shape[2], 1, INNER),
    )


def _group(x: Tensor, weight: Tensor, offsets: Tensor, group_type: int) -> Tensor:
    return npu.npu_grouped_matmul(
        [x], [weight], group_list=offsets.to(torch.int64), split_item=3, group_type=group_type, group_list_type=0
    )[0]


def _zero_outside(y: Tensor, offsets: Tensor, zero_tail: bool = True) -> Tensor:
    if not zero_tail:
        return y
    outside = torch.arange(y.shape[0], device=y.device) >= offsets[-1]
    return y.masked_fill(outside.unsqueeze(1), 0.0)


@lowering(grouped_matmul, "npu_grouped_matmul", _supports_grouped, ("npu_grouped_matmul",))
def _grouped_matmul(x, weight, offsets, zero_tail=True):
    return _zero_outside(_group(x, weight, offsets, 0), offsets, zero_tail)


def _supports_grouped_backward(grad, x, weight, offsets, need_x, need_weight, zero_tail=True):
    return first(check_types((x.dtype,), grad=grad), _supports_grouped(x, weight, offsets))


@lowering(
    grouped_matmul_backward,
    "npu_grouped_matmul, of groups of rows and of columns",
    _supports_grouped_backward,
    ("npu_grouped_matmul",),
)
def _grouped_matmul_backward(grad, x, weight, offsets, need_x, need_weight, zero_tail=True):
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if need_x:
        dx = _zero_outside(_group(grad, weight.transpose(1, 2), offsets, 0), offsets, zero_tail)
    if need_weight:
        dweight = _weight_gradient(grad, x, offsets, dense_order(weight.stride()))
    return dx, dweight


def _weight_gradient(grad: Tensor, x: Tensor, offsets: Tensor, order: list[int]) -> Tensor:
    """x^T grad of each group, stored as the weight is: the kernel's result lies in the order of its dimensions, so that
    grad^T x is computed where the weight is a transposed view."""
    if order == [0, 2, 1]:
        return _group(grad.t(), x, offsets, 2).transpose(1, 2)
    back = [order.index(i) for i in range(3)]
    return _group(x.t(), grad, offsets, 2).permute(order).contiguous().permute(back)
