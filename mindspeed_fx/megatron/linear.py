"""Megatron's tensor-parallel linear and embedding, for a captured graph: collectives and plain ``linear``."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import collectives, fp8_linears, groups, main_grad, patches, uneven

LINEAR = "tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce"


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list | None = None,
    wgrad_deferral_limit: int | None = 0,
    async_grad_allreduce: bool | None = None,
    tp_group: Any = None,
) -> Tensor:
    """``linear_with_grad_accumulation_and_async_allreduce`` as a collective and ``linear``.

    Megatron's own overlaps the input gradient's collective with the weight gradient by ``async_op=True``; in a compiled
    graph that is the scheduler's work. Deferred weight gradients, which write outside the graph, stay with Megatron's
    function.
    """
    if grad_output_buffer is not None or hasattr(weight, "__fsdp_param__"):
        return patches.original(LINEAR)(
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
            grad_output_buffer, wgrad_deferral_limit, async_grad_allreduce, tp_group,
        )  # fmt: skip
    if sequence_parallel:
        input = collectives.gather_from_sequence_parallel_region(input, True, tp_group)
    elif allreduce_dgrad:
        input = collectives.copy_to_tensor_model_parallel_region(input, tp_group)
    if recipe := fp8_linears.recipe_of(weight):
        return fp8_linears.linear(input, weight, bias, recipe)
    return main_grad.linear(input, weight, bias) if gradient_accumulation_fusion else F.linear(input, weight, bias)


def eager_linear(*args: Any, **kwargs: Any) -> Tensor:
    """Outside a graph Megatron's own, but for ``gradient_accumulation_fusion``, whose extension needs CUDA, for parts
    of unequal length, and for products of 8 bits."""
    if torch.compiler.is_compiling():
        return linear(*args, **kwargs)
    fuses = SIGNATURE.bind(*args, **kwargs).arguments["gradient_accumulation_fusion"]
    is_ours = fuses or is_ours_outside_graphs(*args, **kwargs)
    return (linear if is_ours else patches.original(LINEAR))(*args, **kwargs)


SIGNATURE = inspect.signature(linear)


def gathers_unevenly(*args: Any, **kwargs: Any) -> bool:
    """Whether a call gathers a sequence of which ranks hold unequal parts."""
    return uneven.is_sequence_uneven() and SIGNATURE.bind(*args, **kwargs).arguments["sequence_parallel"]


def is_of_8_bits(*args: Any, **kwargs: Any) -> bool:
    """Whether a call of :func:`linear` or :func:`frozen_linear` multiplies 8-bit operands."""
    return fp8_linears.recipe_of(kwargs["weight"] if "weight" in kwargs else args[1]) is not None


def is_ours_outside_graphs(*args: Any, **kwargs: Any) -> bool:
    """Whether Megatron's own function on CUDA cannot do what a call asks for."""
    return gathers_unevenly(*args, **kwargs) or is_of_8_bits(*args, **kwargs)


eager_linear.warned = False  # Megatron's own keeps this flag on whatever has its name


def frozen_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any = None,
    grad_output_buffer: list | None = None,
    wgrad_deferral_limit: int | None = None,
    async_grad_allreduce: bool | None = None,
) -> Tensor:
    """``linear_with_frozen_weight``: the same; autograd makes no weight gradient where none is asked for."""
    return linear(input, weight, bias, False, allreduce_dgrad, sequence_parallel, tp_group=tp_group)


def embedding_forward(self: Any, input_: Tensor) -> Tensor:
    """``VocabParallelEmbedding.forward``: hidden states [batch, seq, hidden] of token ids [batch, seq]; with
    ``reduce_scatter_embeddings`` [seq / ranks, batch, hidden].
    """
    ranks = groups.size(self.tp_group)
    outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
    ids = input_ if ranks == 1 else (input_ - self.vocab_start_index).masked_fill(outside, 0)
    result = self.weight[ids] if self.deterministic_mode else F.embedding(ids, self.weight)
    if ranks > 1:
        result = result.masked_fill(outside.unsqueeze(-1), 0.0)
    if self.reduce_scatter_embeddings:
        return collectives.reduce_scatter_to_sequence_parallel_region(
            result.transpose(0, 1).contiguous(), self.tp_group
        )
    return collectives.reduce_from_tensor_model_parallel_region(result, self.tp_group)
