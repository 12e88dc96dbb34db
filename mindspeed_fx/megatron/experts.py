"""The experts of a mixture as two grouped matrix products: one operator for all experts, with no token count on the
host.

Megatron splits the tokens by counts it reads on the host (``tolist``), one ``linear`` per expert, which breaks a graph
at every layer. The operator takes the counts as a tensor, so that every shape in the graph is known. With
``gradient_accumulation_fusion`` the weights' gradients are made in the type of ``main_grad`` and added to it. With
``--fp8-format`` the products are those of :mod:`mindspeed_fx.megatron.experts_fp8`.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.kernels.cpu.products import product_of
from mindspeed_fx.megatron import fp8_linears, main_grad, patches, zero_memory
from mindspeed_fx.megatron.experts_fp8 import grouped_linear_fp8
from mindspeed_fx.training import gradient_ready

EXPERTS = "transformer.moe.experts:SequentialMLP.forward"


@torch.library.custom_op("mindspeed::grouped_linear", mutates_args=())
def grouped_linear(x: Tensor, weights: list[Tensor], counts: Tensor) -> Tensor:
    """x [tokens, in], sorted by expert: the first ``counts[0]`` rows times ``weights[0].T``, [out, in], and so on; rows
    beyond the sum of ``counts`` become zero. Returns [tokens, out].
    """
    return _multiply(x, weights, counts)


def _multiply(x: Tensor, weights: list[Tensor], counts: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weights[0].shape[0])
    start = 0
    for weight, count in zip(weights, counts.tolist()):
        product_of(x[start : start + count], weight.T, out[start : start + count])
        start += count
    out[start:].zero_()
    return out


@grouped_linear.register_fake
def _(x: Tensor, weights: list[Tensor], counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0])


@torch.library.custom_op("mindspeed::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    grad: Tensor, x: Tensor, weights: list[Tensor], counts: Tensor, is_wide: bool = False
) -> list[Tensor]:
    """The gradients of ``x`` and of each weight.

    Args:
        is_wide: gradients of 16-bit weights are multiplied and summed in float32, and stay so.
    """
    dtype = torch.promote_types(x.dtype, torch.float32) if is_wide else x.dtype
    to_x = torch.empty_like(x)
    to_weights = []
    start = 0
    for weight, count in zip(weights, counts.tolist()):
        rows = slice(start, start + count)
        product_of(grad[rows], weight, to_x[rows])
        to_weights.append(x.new_empty(weight.shape, dtype=dtype))
        product_of(grad[rows].T, x[rows], to_weights[-1])
        start += count
    to_x[start:].zero_()
    return [to_x, *to_weights]


@grouped_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weights: list[Tensor], counts: Tensor, is_wide: bool = False) -> list[Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32) if is_wide else x.dtype
    to_weights = (torch.empty_like(w, memory_format=torch.contiguous_format, dtype=dtype) for w in weights)
    return [torch.empty_like(x), *to_weights]


def _setup(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weights, counts = inputs
    ctx.save_for_backward(x, counts, *weights)


def _backward(ctx: Any, grad: Tensor) -> tuple:
    x, counts, *weights = ctx.saved_tensors
    to_x, *to_weights = grouped_linear_backward(grad, x, weights, counts)
    return to_x, to_weights, None


grouped_linear.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("mindspeed::grouped_linear_main_grad", mutates_args=())
def grouped_linear_main_grad(
    x: Tensor, weights: list[Tensor], counts: Tensor, main_grads: list[Tensor], dummy: bool, keys: list[int]
) -> Tensor:
    """:func:`grouped_linear`, whose backward adds each weight's gradient to its ``main_grad``, [out, in] float32.

    Args:
        dummy, keys: of the weights, as of :func:`mindspeed_fx.megatron.main_grad.linear_main_grad`.
    """
    return _multiply(x, weights, counts)


@grouped_linear_main_grad.register_fake
def _(
    x: Tensor, weights: list[Tensor], counts: Tensor, main_grads: list[Tensor], dummy: bool, keys: list[int]
) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0])


def _setup_main_grad(ctx: Any, inputs: tuple, output: Tensor) -> None:
    # Buffers are not saved: autograd would refuse the change that the backward before made to them.
    x, weights, counts, ctx.main_grads, ctx.dummy, ctx.keys = inputs
    ctx.save_for_backward(x, counts, *weights)


def _backward_main_grad(ctx: Any, grad: Tensor) -> tuple:
    x, counts, *weights = ctx.saved_tensors
    to_x, *to_weights = grouped_linear_backward(grad, x, weights, counts, True)
    for buffer, to_weight, key in zip(ctx.main_grads, to_weights, ctx.keys):
        gradient_ready.accumulate_main_grad(buffer, to_weight, key)
    zeros = [torch.zeros_like(w) if ctx.dummy else None for w in weights]
    return to_x, zeros, None, [None] * len(weights), None, None


grouped_linear_main_grad.register_autograd(_backward_main_grad, setup_context=_setup_main_grad)


def multiply_experts(x: Tensor, linears: list[Any], counts: Tensor, is_last: bool = True) -> Tensor:
    """The product of each expert's rows; gradients of weights go to ``main_grad`` where the layers say so.

    Args:
        is_last: no later gradient of the weights comes in this backward; else nobody is told of this one.
    """
    weights = [linear.weight for linear in linears]
    recipe = fp8_linears.recipe_of(weights[0])
    if recipe or not main_grad.adds_to_main_grad(linears[0].gradient_accumulation_fusion, weights):
        return multiply(x, weights, counts, recipe)
    keys = [gradient_ready.key_of(w) if is_last else gradient_ready.NOBODY for w in weights]
    dummy = is_last and any(main_grad.needs_dummy(w, key) for w, key in zip(weights, keys))
    return grouped_linear_main_grad(x, weights, counts, [w.main_grad for w in weights], dummy, keys)


def multiply(x: Tensor, weights: list[Tensor], counts: Tensor, recipe: str | None) -> Tensor:
    """:func:`grouped_linear`, of operands of 8 bits where there is a recipe for them."""
    return grouped_linear_fp8(x, weights, counts, recipe) if recipe else grouped_linear(x, weights, counts)


def sequential_forward(
    self: Any, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
) -> tuple[Tensor, None]:
    """``SequentialMLP.forward``: tokens [tokens, hidden] sorted by expert, counts [experts], probabilities [tokens]."""
    if fp8_linears.are_of_transformer_engine(self) or not isinstance(tokens_per_expert, Tensor):
        return patches.original(EXPERTS)(self, permuted_local_hidden_states, tokens_per_expert, permuted_probs)
    counts, share = tokens_per_expert, permuted_probs
    return second_product(self, first_product(self, permuted_local_hidden_states, counts, share), counts, share), None


def first_product(self: Any, x: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    """What goes into the activation, without a bias: rows [rows, hidden] -> [rows, width]; ``share``: [rows]."""
    if self.config.moe_apply_probs_on_input:
        x = (share.unsqueeze(-1) * x).to(x.dtype)
    return multiply_experts(x, [e.linear_fc1 for e in self.local_experts], counts)


def second_product(self: Any, inner: Tensor, counts: Tensor, share: Tensor) -> Tensor:
    """What the experts make of :func:`first_product`, each row times its share: [rows, width] -> [rows, hidden]."""
    config, experts = self.config, self.local_experts
    scale = None if config.moe_apply_probs_on_input else share.unsqueeze(-1)
    expert = _expert_of_row(inner.shape[0], counts) if config.add_bias_linear else None

    def activate(inner: Tensor, scale: Tensor | None) -> Tensor:
        if expert is not None:
            inner = inner + torch.stack([e.linear_fc1.bias for e in experts]).index_select(0, expert)
        inner = activation(inner, config)
        return inner if scale is None else (inner * scale).to(inner.dtype)

    hidden, discard = zero_memory.made_again(self, activate, inner, scale)
    out = multiply_experts(hidden, [e.linear_fc2 for e in experts], counts)
    discard(out)
    if expert is not None:
        bias = torch.stack([e.linear_fc2.bias for e in experts]).index_select(0, expert)
        out = out + (bias if scale is None else bias * scale).to(out.dtype)
    return out


def run(layer: Any, enter: Callable[..., tuple], counts: Tensor, *args: Tensor) -> tuple:
    """What the experts of a layer make of the rows that ``enter`` brings to them.

    Args:
        enter: of ``args``; returns rows [rows, hidden], sorted by expert, their shares [rows], and what the way back
            needs.
        counts: rows of each expert.

    Returns:
        [rows, hidden], and what the way back needs.
    """
    if zero_memory.level_of(layer) is None:
        rows, share, *back = enter(*args)
        return layer.experts(rows, counts, share)[0], *back

    def begin(*args: Tensor) -> tuple:
        rows, share, *back = enter(*args)
        return first_product(layer.experts, rows, counts, share), share, *back

    def finish(*args: Tensor) -> tuple:
        inner, share, *back = zero_memory.up_to_first_product(layer, begin, *args)
        return second_product(layer.experts, inner, counts, share), *back

    return zero_memory.whole(layer, finish, *args)


def _expert_of_row(rows: int, counts: Tensor) -> Tensor:
    """[rows] the expert of each row, sorted by expert; that of rows beyond the sum of ``counts`` is the last."""
    ends = counts.cumsum(0)
    row = torch.arange(rows, device=counts.device)
    return torch.searchsorted(ends, row, right=True).clamp(max=counts.shape[0] - 1)


def activation(x: Tensor, config: Any) -> Tensor:
    """The activation of an MLP, or its gate, as ``config`` has it."""
    if not config.gated_linear_unit:
        return config.activation_func(x)
    gate, up = x.chunk(2, -1)
    if config.activation_func_clamp_value is not None:
        limit = config.activation_func_clamp_value
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if config.glu_linear_offset:
        up = up + config.glu_linear_offset
    gate = F.silu(gate) if config.activation_func is F.silu else config.activation_func(gate)
    return gate * up
