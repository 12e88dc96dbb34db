"""Weight gradients of a grouped product, added to one float32 buffer of all groups: ``out_e += x_e^T grad_e``.

Source: MindSpeed's ``npu_groupmatmul_add_fp32``; torch_npu's ``npu_grouped_matmul_add_`` is its kernel. No gradient of
the weights' size lives beside the buffer. A frontend's operator, since its write has no placement of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import Cost, size
from mindspeed_fx.kernels.base import adopt


@torch.library.custom_op("mindspeed::grouped_matmul_add", mutates_args={"out"})
def grouped_matmul_add(out: Tensor, x: Tensor, grad: Tensor, offsets: Tensor) -> None:
    """``out`` [groups, k, n] += x_e^T grad_e for the rows of each group, in the type of ``out``.

    Args:
        out: float, contiguous; float32 as a rule.
        x: [tokens, k], sorted by group.
        grad: [tokens, n].
        offsets: [groups] int64: where each group ends; rows after the last are not read.
    """
    start = 0
    for end, buffer in zip(offsets.tolist(), out):
        buffer.addmm_(x[start:end].t().to(out.dtype), grad[start:end].to(out.dtype))
        start = end


@grouped_matmul_add.register_fake
def _(out: Tensor, x: Tensor, grad: Tensor, offsets: Tensor) -> None:
    return None


add = adopt(torch.ops.mindspeed.grouped_matmul_add.default, grouped_matmul_add)


@add.costs
def _cost(result: Any, out: Any, x: Any, grad: Any, offsets: Any) -> Cost:
    """The buffer is read and written; rows are of one group each."""
    flops = 2 * x.shape[0] * x.shape[1] * grad.shape[1]
    return Cost(flops, flops, 0, size(out, x, grad, offsets), out.bytes, x.dtype)


@torch.library.custom_op("mindspeed::grouped_matmul_main_grad", mutates_args=())
def grouped_matmul_main_grad(x: Tensor, weight: Tensor, offsets: Tensor, main_grad: Tensor) -> Tensor:
    """``mindspeed::grouped_matmul`` of ``weight`` [groups, k, n], whose backward adds the gradient of the weight to
    ``main_grad`` [groups, k, n] and gives none."""
    return torch.ops.mindspeed.grouped_matmul(x.detach(), weight.detach(), offsets)


@grouped_matmul_main_grad.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor, main_grad: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, offsets, ctx.main_grad = inputs  # not saved: backwards of other micro-batches change it
    ctx.save_for_backward(x, weight, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, weight, offsets = ctx.saved_tensors
    if ctx.needs_input_grad[1]:
        grouped_matmul_add(ctx.main_grad, x, grad, offsets)
    if not ctx.needs_input_grad[0]:
        return None, None, None, None
    dx, _ = torch.ops.mindspeed.grouped_matmul_backward(grad, x, weight, offsets, True, False)
    return dx, None, None, None


grouped_matmul_main_grad.register_autograd(_backward, setup_context=_setup)
main_grad_product = adopt(torch.ops.mindspeed.grouped_matmul_main_grad.default, grouped_matmul_main_grad)


@main_grad_product.costs
def _product_cost(out: Any, x: Any, weight: Any, offsets: Any, main_grad: Any) -> Cost:
    flops = 2 * x.shape[0] * weight.shape[1] * weight.shape[2]
    return Cost(flops, flops, 0, size(x, weight, offsets), out.bytes, x.dtype)
