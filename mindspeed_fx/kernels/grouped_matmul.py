"""Grouped matrix product: rows sorted by group, each group times a matrix of its own (the experts of a mixture).

Source: ``npu_grouped_matmul`` of torch_npu (group_type 0, group_list cumulative; its weight gradient is group_type 2)
and ``aten._grouped_mm``. Unlike both, every type is allowed, float64 included, and rows that belong to no group are
zero instead of undefined.
"""

from __future__ import annotations

from typing import Iterator

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels.base import LIBRARY, operator
from mindspeed_fx.kernels.cpu.products import product_of


def _split(offsets: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of each group, of each of ``tensors`` [tokens, ...]; those after the last group are left out."""
    ends = offsets.tolist()
    counts = [end - start for start, end in zip([0, *ends], ends)]
    return zip(*(t[: sum(counts)].split(counts) for t in tensors))


def _allocate_rows(x: Tensor, width: int, offsets: Tensor) -> Tensor:
    """[tokens, width], to be filled but for the rows after the last group, which are zero."""
    out = x.new_empty(x.shape[0], width)
    out[int(offsets[-1]) :].zero_()
    return out


def _fake(x, weight, offsets, zero_tail=True):
    return x.new_empty(x.shape[0], weight.shape[2])


@operator("grouped_matmul(Tensor x, Tensor weight, Tensor offsets, bool zero_tail=True) -> Tensor", _fake, opaque=True)
def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, zero_tail: bool = True) -> Tensor:
    """One matrix product per group of rows.

    Args:
        x: [tokens, k], float; the rows of group 0 come first, then those of group 1, and so on.
        weight: [groups, k, n] in any layout, the dtype of ``x``.
        offsets: [groups] int32 or int64, not falling: where each group ends; at least one. Groups may be empty.
        zero_tail: False where rows from ``offsets[-1]`` on, of the result and of the gradient of ``x``, are none, or
            may be anything: a kernel that leaves them undefined then needs no second one that clears them.

    Returns:
        [tokens, n], contiguous; rows from ``offsets[-1]`` on are zero.
    """
    # One ATen product per group, into place: what aten._grouped_mm does on CPU too. oneDNN, faster for fixed shapes,
    # gains nothing: it makes a kernel for every number of rows it has not seen, and routing brings new ones at every
    # step.
    out = _allocate_rows(x, weight.shape[2], offsets)
    for (rows, result), matrix in zip(_split(offsets, x, out), weight):
        product_of(rows, matrix, result)
    return out


def _fake_backward(grad, x, weight, offsets, need_x, need_weight, zero_tail=True):
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if need_x else x.new_empty(0)
    return dx, torch.empty_like(weight) if need_weight else x.new_empty(0)


@operator(
    "grouped_matmul_backward(Tensor grad, Tensor x, Tensor weight, Tensor offsets, bool need_x, bool need_weight, "
    "bool zero_tail=True) -> (Tensor, Tensor)",
    _fake_backward,
    opaque=True,
)
def grouped_matmul_backward(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, need_x: bool, need_weight: bool, zero_tail: bool = True
) -> tuple[Tensor, Tensor]:
    """Gradients (dx, dweight) of :func:`grouped_matmul`; the one that is not needed is empty.

    Per group: dx = grad w^T, dweight = x^T grad, zero for a group without rows. dweight is stored as ``weight`` is.
    """
    dx = _allocate_rows(x, x.shape[1], offsets) if need_x else x.new_empty(0)
    dweight = torch.empty_like(weight) if need_weight else x.new_empty(0)
    if need_x:
        for (g, result), matrix in zip(_split(offsets, grad, dx), weight):
            product_of(g, matrix.t(), result)
    if need_weight:
        for (g, rows), result in zip(_split(offsets, grad, x), dweight):
            product_of(rows.t(), g, result)
    return dx, dweight


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.zero_tail = inputs[3]


def _backward(ctx, grad):
    x, weight, offsets = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    arguments = (grad, x, weight, offsets, need_x, need_weight)
    dx, dweight = torch.ops.mindspeed.grouped_matmul_backward(*arguments, ctx.zero_tail)
    return dx if need_x else None, dweight if need_weight else None, None, None


torch.library.register_autograd("mindspeed::grouped_matmul", _backward, setup_context=_setup, lib=LIBRARY)


@grouped_matmul.shard
def _sharding_rule(x, weight, offsets, zero_tail=True):
    """By column or by summand of every product; rows and groups are divided by an exchange of tokens, not here."""
    return [([1], [REPLICATED, 2, REPLICATED]), ([PARTIAL], [1, 1, REPLICATED])]


@grouped_matmul_backward.shard
def _sharding_rule_backward(grad, x, weight, offsets, need_x, need_weight, zero_tail=True):
    column = [PARTIAL if need_x else REPLICATED, 2 if need_weight else REPLICATED]
    row = [1 if need_x else REPLICATED, 1 if need_weight else REPLICATED]
    return [(column, [1, REPLICATED, 2, REPLICATED]), (row, [REPLICATED, 1, 1, REPLICATED])]


@grouped_matmul.costs
def _cost(out, x, weight, offsets, zero_tail=True):
    """Every row times one matrix, as if every row had a group."""
    return once(out, x, weight, offsets, flops=2 * x.shape[0] * weight.shape[1] * weight.shape[2], dtype=x.dtype)


@grouped_matmul_backward.costs
def _backward_cost(out, grad, x, weight, offsets, need_x, need_weight, zero_tail=True):
    """Each of the two gradients is one product more, and reads the operand it needs."""
    flops = (need_x + need_weight) * 2 * x.shape[0] * weight.shape[1] * weight.shape[2]
    return once(out, grad, x if need_weight else None, weight if need_x else None, offsets, flops=flops, dtype=x.dtype)
