"""The experts' products of 8-bit operands: one operator for all experts, each of which scales its own rows and weight.

As TransformerEngine's grouped linear, which quantizes the rows of every expert by themselves.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from mindspeed_fx.cost.operators import once
from mindspeed_fx.kernels.base import Operator, adopt
from mindspeed_fx.kernels.linear_fp8 import NUMBERS, linear_fp8, linear_fp8_backward


def _runs(operator: Operator, *args: Any) -> Any:
    """What ``operator`` gives of tensors at hand, by its kernel for these sizes."""
    kernel, _ = operator.choose(args[0].device.type, args, {})
    return (kernel.build if kernel else operator.reference)(*args)


def _rows(counts: Tensor) -> Iterator[slice]:
    start = 0
    for count in counts.tolist():
        yield slice(start, start := start + count)


@torch.library.custom_op("mindspeed::grouped_linear_fp8", mutates_args=())
def grouped_linear_fp8(x: Tensor, weights: list[Tensor], counts: Tensor, recipe: str) -> Tensor:
    """:func:`mindspeed_fx.megatron.experts.grouped_linear` of operands of 8 bits.

    Args:
        x: [tokens, in], sorted by expert.
        weights: [out, in] of every expert, of the type of ``x``.
        counts: [experts], rows of each.
        recipe: one of :data:`mindspeed_fx.kernels.linear_fp8.RECIPES`.

    Returns:
        [tokens, out]; rows beyond the sum of ``counts`` are zero.
    """
    out = x.new_zeros(x.shape[0], weights[0].shape[0])
    for weight, rows in zip(weights, _rows(counts)):
        if rows.stop > rows.start:
            out[rows] = _runs(linear_fp8, x[rows], weight, recipe)
    return out


@grouped_linear_fp8.register_fake
def _(x: Tensor, weights: list[Tensor], counts: Tensor, recipe: str) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0])


@torch.library.custom_op("mindspeed::grouped_linear_fp8_backward", mutates_args=())
def grouped_linear_fp8_backward(
    grad: Tensor, x: Tensor, weights: list[Tensor], counts: Tensor, recipe: str, needed: list[bool]
) -> list[Tensor]:
    """The gradients of ``x`` and of each weight.

    Args:
        needed: whether that of ``x`` is, and those of the weights; what is not has size 0.
    """
    to_x = torch.zeros_like(x) if needed[0] else x.new_empty(0)
    to_weights = [w.new_zeros(w.shape) if needed[1] else w.new_empty(0) for w in weights]
    for weight, to_weight, rows in zip(weights, to_weights, _rows(counts)):
        if rows.stop > rows.start:
            parts = _runs(linear_fp8_backward, grad[rows], x[rows], weight, recipe, needed)
            for whole, part in zip((to_x[rows] if needed[0] else to_x, to_weight), parts):
                whole.copy_(part)
    return [to_x, *to_weights]


@grouped_linear_fp8_backward.register_fake
def _(grad: Tensor, x: Tensor, weights: list[Tensor], counts: Tensor, recipe: str, needed: list[bool]) -> list[Tensor]:
    to_x = torch.empty_like(x) if needed[0] else x.new_empty(0)
    return [to_x, *(w.new_empty(w.shape if needed[1] else 0) for w in weights)]


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, counts, ctx.recipe = inputs
    ctx.save_for_backward(x, counts, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, counts, *weights = ctx.saved_tensors
    to, of_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
    needed = [to, any(of_weights)]
    to_x, *to_weights = grouped_linear_fp8_backward(grad, x, weights, counts, ctx.recipe, needed)
    each = [g if need else None for g, need in zip(to_weights, of_weights)]
    return to_x if to else None, each, None, None


grouped_linear_fp8.register_autograd(_backward, setup_context=_setup)


def _adopt(name: str, function: Callable[..., Any]) -> Operator:
    return adopt(getattr(torch.ops.mindspeed, name).default, function)


@_adopt("grouped_linear_fp8", grouped_linear_fp8).costs
def _cost(out: Any, x: Any, weights: Any, counts: Any, recipe: str) -> Any:
    """Every row times one matrix, as if every row had an expert; operands are rounded by the vector units."""
    vector = 5 * (x.numel + sum(w.numel for w in weights)) + out.numel
    return once(out, x, weights, counts, flops=2 * out.numel * x.shape[1], vector=vector, dtype=NUMBERS)


@_adopt("grouped_linear_fp8_backward", grouped_linear_fp8_backward).costs
def _backward_cost(out: Any, grad: Any, x: Any, weights: Any, counts: Any, recipe: str, needed: list[bool]) -> Any:
    to_x, to_weights = (int(n) for n in needed)
    sizes = [grad.numel, to_x * sum(w.numel for w in weights), to_weights * x.numel]
    flops = 2 * (to_x + to_weights) * grad.numel * x.shape[1]
    return once(out, grad, x, weights, counts, flops=flops, vector=5 * sum(sizes), dtype=NUMBERS)
