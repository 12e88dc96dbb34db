"""Megatron's fused activations without their handwritten backward, which would hide them from the compiler's passes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> Tensor:
    """SwiGLU of packed halves [gate, up]; how the input is stored for the backward is the compiler's to decide."""
    gate, up = (input if bias is None else input + bias).chunk(2, -1)
    return F.silu(gate) * up


def weighted_bias_swiglu_impl(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor:
    """SwiGLU times a weight per token (the router's probabilities); the product is returned in the type of
    ``input``.
    """
    if bias is not None:  # refused in Megatron's own words: its kernel has no bias here either
        raise NotImplementedError("Bias is not supported for weighted swiglu fusion")
    gate, up = input.chunk(2, -1)
    return (F.silu(gate) * up * weights).to(input.dtype)


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """GELU (tanh approximation, as Megatron's) of the first half times the second."""
    gate, up = (input if bias is None else input + bias).chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(input + bias, approximate="tanh")
