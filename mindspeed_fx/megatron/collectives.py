"""Megatron's mappings between tensor- and sequence-parallel regions as functional collectives.

A group of one rank is no node at all, so that the compiler sees plain ``linear`` and ``embedding``. With more ranks
each mapping is an ``autograd.Function`` over functional collectives. (Megatron's own write into shared buffers and into
their argument, which a graph cannot own.) The numerics are Megatron's.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor

from mindspeed_fx.megatron import uneven
from mindspeed_fx.megatron.groups import group_or_default, has_accelerator, size

HAS_GRADIENTS = hasattr(functional, "all_to_all_single_backward")
"""Whether this torch's functional collectives have gradients of their own."""

# --------------------------------------------------------------------------- the collectives, one way


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", group))


def _all_gather(x: Tensor, dim: int, group: Any) -> Tensor:
    # Gathered along the first dimension, and put together here: what torch 2.11 calls for other dimensions cannot be
    # traced.
    whole = functional.wait_tensor(functional.all_gather_tensor(x.contiguous(), 0, group))
    return whole if dim == 0 else torch.cat(whole.chunk(group.size(), 0), dim)


def gather(x: Tensor, group: Any) -> Tensor:
    """x [n, ...] of every rank -> [ranks * n, ...], without a gradient."""
    return _all_gather(x.detach(), 0, group)


def all_reduce(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks, without a gradient."""
    return _all_reduce(x.detach(), group)


def reduce_scatter(x: Tensor, group: Any) -> Tensor:
    """x [ranks * n, ...] -> the own rows of the sum over ranks, [n, ...], without a gradient."""
    return _reduce_scatter(x.detach(), 0, group)


def _reduce_scatter(x: Tensor, dim: int, group: Any) -> Tensor:
    return functional.wait_tensor(functional.reduce_scatter_tensor(x.contiguous(), "sum", dim, group))


def _own_part(x: Tensor, dim: int, group: Any) -> Tensor:
    if x.shape[dim] % group.size():
        raise ValueError(
            f"dimension {dim} of size {x.shape[dim]} is not divisible by the {group.size()} tensor-parallel ranks"
        )
    # A copy, for torch 2.11 replaces a Function whose result is a view of its argument by that view, and the gradient
    # is lost.
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


class _UnevenGather(torch.autograd.Function):
    """Forward: all-gather of parts of different length. Backward: their reduce-scatter, or the own part where every
    rank holds the same gradient. Through parts of equal length, for gloo has no others.
    """

    @staticmethod
    def forward(ctx, x, group, sizes, reduce):
        ctx.group, ctx.sizes, ctx.reduce = group, sizes, reduce
        return _gather_parts(x, group, sizes)

    @staticmethod
    def backward(ctx, grad):
        back = _scatter_sum if ctx.reduce else _own_rows
        return back(grad, ctx.group, ctx.sizes), None, None, None


class _UnevenScatter(torch.autograd.Function):
    """Forward: own part of parts of different length. Backward: their all-gather."""

    @staticmethod
    def forward(ctx, x, group, sizes):
        ctx.group, ctx.sizes = group, sizes
        return _own_rows(x, group, sizes)

    @staticmethod
    def backward(ctx, grad):
        return _gather_parts(grad, ctx.group, ctx.sizes), None, None


class _UnevenReduceScatter(torch.autograd.Function):
    """Forward: reduce-scatter into parts of different length. Backward: their all-gather."""

    @staticmethod
    def forward(ctx, x, group, sizes):
        ctx.group, ctx.sizes = group, sizes
        return _scatter_sum(x, group, sizes)

    @staticmethod
    def backward(ctx, grad):
        return _gather_parts(grad, ctx.group, ctx.sizes), None, None


def _gather_parts(x: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """x [sizes[rank], ...] of every rank -> [sum(sizes), ...]."""
    whole = _all_gather(_lengthen(x, max(sizes)), 0, group)
    return torch.cat([part[:n] for part, n in zip(whole.chunk(len(sizes), 0), sizes)], 0)


def _scatter_sum(x: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """x [sum(sizes), ...] of every rank -> the sum's own part, [sizes[rank], ...]."""
    longest = max(sizes)
    own = _reduce_scatter(torch.cat([_lengthen(part, longest) for part in x.split(sizes, 0)], 0), 0, group)
    return own[: sizes[group.rank()]].clone()


def _own_rows(x: Tensor, group: Any, sizes: list[int]) -> Tensor:
    """x [sum(sizes), ...] -> a copy of the own part, [sizes[rank], ...]."""
    return x.split(sizes, 0)[group.rank()].clone(memory_format=torch.contiguous_format)


def _lengthen(x: Tensor, rows: int) -> Tensor:
    """x [n, ...] with rows of zeros behind: [rows, ...]."""
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])], 0)


class _AllToAll(torch.autograd.Function):
    """Forward: all-to-all over the first dimension. Backward: the all-to-all back."""

    @staticmethod
    def forward(ctx, x, group, output_splits, input_splits):
        ctx.group, ctx.output_splits, ctx.input_splits = group, output_splits, input_splits
        return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), output_splits, input_splits, group))

    @staticmethod
    def backward(ctx, grad):
        back = functional.wait_tensor(
            functional.all_to_all_single(grad.contiguous(), ctx.input_splits, ctx.output_splits, ctx.group)
        )
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
    if size(group) == 1:
        return input_
    sizes = uneven.sequence_parts(size(group))
    return _Scatter.apply(input_, 0, group) if sizes is None else _UnevenScatter.apply(input_, group, sizes)


def gather_from_sequence_parallel_region(
    input_, tensor_parallel_output_grad=True, group=None, output_split_sizes=None, use_global_buffer=False
) -> Tensor:
    group = group_or_default(group)
    if size(group) == 1:
        return input_
    if output_split_sizes is not None:
        if not tensor_parallel_output_grad:
            raise NotImplementedError(
                f"output_split_sizes={output_split_sizes} without tensor_parallel_output_grad has no gradient, here "
                "and in Megatron"
            )
        return _UnevenGather.apply(input_, group, [int(n) for n in output_split_sizes], True)
    sizes = uneven.sequence_parts(size(group))
    if sizes is not None:
        return _UnevenGather.apply(input_, group, sizes, tensor_parallel_output_grad)
    return _Gather.apply(input_, 0, group, tensor_parallel_output_grad)


def reduce_scatter_to_sequence_parallel_region(
    input_, group=None, input_split_sizes=None, use_global_buffer=False
) -> Tensor:
    group = group_or_default(group)
    if size(group) == 1:
        return input_
    if input_split_sizes is not None:
        return _UnevenReduceScatter.apply(input_, group, [int(n) for n in input_split_sizes])
    sizes = uneven.sequence_parts(size(group))
    if sizes is not None:
        return _UnevenReduceScatter.apply(input_, group, sizes)
    return _ReduceScatter.apply(input_, 0, group)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _Gather.apply(input_, input_.dim() - 1, group, True)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Any = None) -> Tensor:
    group = group_or_default(group)
    return input_ if size(group) == 1 else _ReduceScatter.apply(input_, input_.dim() - 1, group)


def all_to_all(group, input_, output_split_sizes_=None, input_split_sizes=None) -> Tensor:
    return input_ if size(group) == 1 else _AllToAll.apply(input_, group, output_split_sizes_, input_split_sizes)


def plain_all_to_all(group: Any, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Tensor:
    """:func:`all_to_all` with torch's own gradient of it (torch 2.13), for checkpointed regions in a graph.

    Dynamo loses symbols that an ``autograd.Function`` keeps there.

    Raises:
        NotImplementedError: this torch has no gradient of it.
    """
    if not HAS_GRADIENTS:
        raise NotImplementedError(
            "an exchange that is made again in a graph needs torch 2.13; use MINDSPEED_FX_COMPILE=0"
        )
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), output_splits, input_splits, group))


def moves_uneven_parts(name: str) -> Callable[..., bool]:
    """Whether a call of a mapping moves parts of different length, which Megatron's own or gloo cannot.

    Args:
        name: of the mapping, one of ``UNEVEN``.
    """
    signature = inspect.signature(globals()[name])

    def answer(*args: Any, **kwargs: Any) -> bool:
        arguments = signature.bind(*args, **kwargs).arguments
        if uneven.sequence_parts(size(group_or_default(arguments.get("group")))) is not None:
            return True
        return not has_accelerator() and arguments.get(UNEVEN[name]) is not None

    return answer


UNEVEN = {
    "scatter_to_sequence_parallel_region": "",
    "gather_from_sequence_parallel_region": "output_split_sizes",
    "reduce_scatter_to_sequence_parallel_region": "input_split_sizes",
}
"""Mappings whose parts may differ in length, and the argument that says so: dropless experts with tensor
parallelism. Without it --unaligned-linear decides.
"""

MAPPINGS = (
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "all_gather_last_dim_from_tensor_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "all_to_all",
)
