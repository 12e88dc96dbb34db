"""Megatron's layer functions in a form that is captured whole: same numerics, no ``autograd.Function`` of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_fx.megatron import collectives


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
    """``linear_with_grad_accumulation_and_async_allreduce`` as a collective and a plain ``linear``.

    Megatron's own overlaps the input gradient's collective with the weight gradient by ``async_op=True``; in a compiled
    graph that is the scheduler's work. Gradient accumulation into ``main_grad`` and deferred weight gradients, which
    write outside the graph, stay with Megatron's function.
    """
    if gradient_accumulation_fusion or grad_output_buffer is not None:
        return _original_linear()(
            input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
            grad_output_buffer, wgrad_deferral_limit, async_grad_allreduce, tp_group,
        )  # fmt: skip
    if sequence_parallel:
        input = collectives.gather_from_sequence_parallel_region(input, True, tp_group)
    elif allreduce_dgrad:
        input = collectives.copy_to_tensor_model_parallel_region(input, tp_group)
    return F.linear(input, weight, bias)


linear.warned = True  # Megatron's function carries this attribute; callers may read it


def _original_linear() -> Any:
    from mindspeed_fx.megatron import ORIGINALS

    return ORIGINALS["linear"]


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None) -> Tensor:
    """Loss per token, [seq, batch], of logits [seq, batch, vocab / ranks]; float32.

    One rank: ``torch.nn.functional.cross_entropy``, with Megatron's label smoothing (the smoothed weight is shared by
    the other vocab - 1 classes). More ranks: the log-sum-exp over all shards by two all-reduces.
    """
    group = collectives.group_or_default(tp_group)
    ranks = 1 if group is None else group.size()
    vocab = vocab_parallel_logits.shape[-1] * ranks
    if ranks == 1:
        flat = vocab_parallel_logits.float().reshape(-1, vocab)
        # Megatron: (1 - s) nll - s mean(log p) with s = smoothing * vocab / (vocab - 1); torch's s is this s.
        smoothing = label_smoothing * vocab / (vocab - 1) if label_smoothing else 0.0
        return F.cross_entropy(flat, target.reshape(-1), reduction="none", label_smoothing=smoothing).view(target.shape)
    logits = vocab_parallel_logits.float()
    with torch.no_grad():
        top = collectives.functional.wait_tensor(collectives.functional.all_reduce(logits.amax(-1), "max", group))
    logits = logits - top.unsqueeze(-1)
    first = group.rank() * logits.shape[-1]
    local = target - first
    outside = (local < 0) | (local >= logits.shape[-1])
    picked = logits.gather(-1, local.masked_fill(outside, 0).unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
    picked = collectives.reduce_from_tensor_model_parallel_region(picked, group)
    total = collectives.reduce_from_tensor_model_parallel_region(logits.exp().sum(-1), group)
    loss = total.log() - picked
    if label_smoothing:
        smoothing = label_smoothing * vocab / (vocab - 1)
        mean_log_probability = collectives.reduce_from_tensor_model_parallel_region(logits.sum(-1), group) / vocab - total.log()
        loss = (1 - smoothing) * loss - smoothing * mean_log_probability
    return loss


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


def bias_swiglu_impl(input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False) -> Tensor:
    """SwiGLU of packed halves, as Megatron's ``SwiGLUFunction`` without its handwritten backward."""
    gate, up = (input if bias is None else input + bias).chunk(2, -1)
    return F.silu(gate) * up


def weighted_bias_swiglu_impl(input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False) -> Tensor:
    """SwiGLU times a weight per token (the router's probabilities); the product is returned in the type of ``input``."""
    if bias is not None:
        raise NotImplementedError("Bias is not supported for weighted swiglu fusion")
    gate, up = input.chunk(2, -1)
    return (F.silu(gate) * up * weights).to(input.dtype)


def torch_norm_new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, persist_layer_norm: bool = False, zero_centered_gamma: bool = False, normalization: str = "LayerNorm") -> torch.nn.Module:
    """``WrappedTorchNorm.__new__`` that also serves sequence parallelism: its parameters carry the attribute by which
    Megatron sums their gradients over the tensor-parallel ranks, as the fused norms' do.

    Raises:
        ValueError: a setting torch's norms do not have.
    """
    for setting in ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"):
        if getattr(config, setting):
            raise ValueError(f"{setting} is not supported by torch's norms")
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm, "L2Norm": _l2_norm}
    if config.normalization not in kinds:
        raise ValueError(f"normalization is {config.normalization!r}; valid: {', '.join(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


def _l2_norm(hidden_size: int, eps: float) -> torch.nn.Module:
    from megatron.core.transformer.torch_norm import L2Norm

    return L2Norm(hidden_size, eps=eps)
