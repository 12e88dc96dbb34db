"""Megatron's mappings between tensor- and sequence-parallel regions as functional collectives.

A group of one rank is no node at all, so that the compiler sees plain ``linear`` and ``embedding``. With more ranks each
mapping is an ``autograd.Function`` over functional collectives. (Megatron's own write into shared buffers and into their
argument, which a graph cannot own.) The numerics are Megatron's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from mindspeed_fx.megatron.groups import group_or_default, size


# --------------------------------------------------------------------------- the collectives, one way


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))


def _all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
    # Gathered along the first dimension, and put together here: what torch 2.11 calls for other dimensions cannot be traced.
    whole = functional.wait_tensor(functional.all_gather_tensor(x.contiguous(), 0, group))
    return whole if dim == 0 else torch.cat(whole.chunk(group.size(), 0), dim)


def _reduce_scatter(x: Tensor, dim: int, group: Any) -> Tensor:
    return functional.wait_tensor(functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, group))


def _own_part(x: Tensor, dim: int, group: Any) -> Tensor:
    if x.shape[dim] % group.size():
        raise ValueError(f"dimension {dim} of size {x.shape[dim]} is not divisible by the {group.size()} tensor-parallel ranks")
    # A copy, for torch 2.11 replaces a Function whose result is a view of its argument by that view, and the gradient is lost.
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


class _Copy(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        return _all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def forward(ctx, x, group):
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class _Scatter(torch.autograd.Function):
    """Forward: own part. Backward: all-gather."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _own_part(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _Gather(torch.autograd.Function):
    """Forward: all-gather. Backward: reduce-scatter, or own part where every rank holds the same gradient."""

    @staticmethod
    def forward(ctx, x, dim, group, reduce):
        ctx.dim, ctx.group, ctx.reduce = dim, group, reduce
        return _all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        back = _reduce_scatter if ctx.reduce else _own_part
        return back(grad, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: all-gather."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    """Forward: all-to-all over the first dimension. Backward: the all-to-all back."""

    @staticmethod
    def forward(ctx, x, group, output_splits, input_splits):
        ctx.group, ctx.output_splits, ctx.input_splits = group, output_splits, input_splits
        return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), output_splits, input_splits, group))

    @staticmethod
    def backward(ctx, grad):
        back = functional.wait_tensor(functional.all_to_all_single(grad.contiguous(), ctx.input_splits, ctx.output_splits, ctx.group))
        return back, None, None, None


# --------------------------------------------------------------------------- Megatron's names


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _Copy.apply(input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _Reduce.apply(input_, group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _Scatter.apply(input_, input_.dim() - 1, group)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _Gather.apply(input_, input_.dim() - 1, group, False)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _Scatter.apply(input_, 0, group)


def gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=None, output_split_sizes=None, use_global_buffer=False) -> Tensor:
    group = group_or_default(group)
    if size(group) == 1:
        return input_
    _refuse_uneven("output_split_sizes", output_split_sizes)
    return _Gather.apply(input_, 0, group, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(input_, group=None, input_split_sizes=None, use_global_buffer=False) -> Tensor:
    group = group_or_default(group)
    if size(group) == 1:
        return input_
    _refuse_uneven("input_split_sizes", input_split_sizes)
    return _ReduceScatter.apply(input_, 0, group)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _Gather.apply(input_, input_.dim() - 1, group, True)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _ReduceScatter.apply(input_, input_.dim() - 1, group)


def all_to_all(group, input_, output_split_sizes_=None, input_split_sizes=None) -> Tensor:
    return input_ if size(group) == 1 else _AllToAll.apply(input_, group, output_split_sizes_, input_split_sizes)


def _refuse_uneven(name: str, sizes: Any) -> None:
    if sizes is not None:
        raise NotImplementedError(f"{name}={sizes}: uneven sequence shards are not supported by the mindspeed_fx adaptor; call mindspeed_fx.megatron_adaptor.undo() to use Megatron's own")


MAPPINGS = (
    "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region", "scatter_to_sequence_parallel_region", "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region", "all_gather_last_dim_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region", "all_to_all",
)  # fmt: skip
