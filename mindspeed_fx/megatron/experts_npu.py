"""Cost of the experts' products, and their kernel on NPU: ``npu_grouped_matmul`` with a list of weights, so that no
copy joins them.

In float32 the kernel takes single tensors only, and the weights are stacked. Rows without an expert are undefined there
and zero here. The weight gradients are one product in groups of the summed dimension (group_type 2), whose slices they
are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels.base import adopt
from mindspeed_fx.kernels.npu import check_types, first, lowering, within
from mindspeed_fx.kernels.npu.grouped_matmul import INNER, _zero_outside
from mindspeed_fx.megatron import experts

npu, OP, ADD = torch.ops.npu, "npu_grouped_matmul", "npu_grouped_matmul_add_"
grouped_linear = adopt(torch.ops.mindspeed.grouped_linear.default, experts.grouped_linear)
grouped_linear_backward = adopt(torch.ops.mindspeed.grouped_linear_backward.default, experts.grouped_linear_backward)


grouped_linear_main_grad = adopt(torch.ops.mindspeed.grouped_linear_main_grad.default, experts.grouped_linear_main_grad)


@grouped_linear_main_grad.costs
def _main_grad_cost(out: Any, x: Any, weights: Any, counts: Any, *others: Any) -> Any:
    return _cost(out, x, weights, counts)


@grouped_linear.costs
def _cost(out: Any, x: Any, weights: Any, counts: Any) -> Any:
    """Every row times one matrix, as if every row had an expert."""
    return once(out, x, weights, counts, flops=2 * out.numel * x.shape[1], dtype=x.dtype)


@grouped_linear_backward.costs
def _backward_cost(out: Any, grad: Any, x: Any, weights: Any, counts: Any, is_wide: bool = False) -> Any:
    return once(out, grad, x, weights, counts, flops=4 * grad.numel * x.shape[1], dtype=x.dtype)


def _supports(x: Tensor, weights: list[Tensor], counts: Tensor, grad: Tensor | None = None) -> str | None:
    kinds = {w.dtype for w in weights} | {x.dtype}
    return first(
        check_types(x=x),
        check_types((x.dtype,), grad=grad),
        f"{OP}: x and the weights are {', '.join(sorted(map(str, kinds)))}; valid: one type".replace("torch.", "")
        if len(kinds) > 1
        else None,
        within(f"{OP}: experts", len(weights), 2, 128),
        within(f"{OP}: k", x.shape[1], 1, INNER),
        within(f"{OP}: n", weights[0].shape[0], 1, INNER),
    )


def _rows(x: Tensor, weights: list[Tensor], ends: Tensor) -> Tensor:
    """Each expert's rows of x times its [k, n] of ``weights``; zero after the last."""
    arguments = [torch.stack(weights)] if x.dtype == torch.float32 else list(weights)
    return _zero_outside(
        npu.npu_grouped_matmul([x], arguments, group_list=ends, split_item=3, group_type=0, group_list_type=0)[0], ends
    )


@lowering(grouped_linear, OP, _supports, (OP,))
def _group(x, weights, counts):
    return _rows(x, [w.t() for w in weights], counts.to(torch.int64).cumsum(0))


@lowering(
    grouped_linear_main_grad,
    OP,
    lambda x, weights, counts, main_grads, dummy, keys: _supports(x, weights, counts),
    (OP,),
)
def _group_main_grad(x, weights, counts, main_grads, dummy, keys):
    return _group(x, weights, counts)


def _widens(x: Tensor, is_wide: bool) -> bool:
    return is_wide and x.dtype != torch.float32


@lowering(
    grouped_linear_backward,
    f"{OP} and {ADD} to zeros",
    lambda grad, x, weights, counts, is_wide=False: first(
        _supports(x, weights, counts, grad),
        None if _widens(x, is_wide) else f"{ADD}: nothing to widen; valid: 16-bit factors of float32 gradients",
    ),
    (OP, ADD),
)
def _wide_backward(grad, x, weights, counts, is_wide=False):
    """16-bit factors are multiplied and summed in float32, which ``npu_grouped_matmul`` alone would round."""
    ends = counts.to(torch.int64).cumsum(0)
    to_weights = torch.zeros(len(weights), *weights[0].shape, dtype=torch.float32, device=x.device)
    npu.npu_grouped_matmul_add_(to_weights, grad, x, ends)
    return [_rows(grad, weights, ends), *to_weights.unbind(0)]


@lowering(
    grouped_linear_backward,
    f"{OP}, of groups of rows and of columns",
    lambda grad, x, weights, counts, is_wide=False: first(
        _supports(x, weights, counts, grad),
        f"{OP}: float32 gradients of {x.dtype} factors" if _widens(x, is_wide) else None,
    ),
    (OP,),
)
def _grouped_backward(grad, x, weights, counts, is_wide=False):
    ends = counts.to(torch.int64).cumsum(0)
    to_weights = npu.npu_grouped_matmul(
        [grad.t()], [x], group_list=ends, split_item=3, group_type=2, group_list_type=0
    )[0]
    return [_rows(grad, weights, ends), *to_weights.unbind(0)]
