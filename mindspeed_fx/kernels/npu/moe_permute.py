"""Tokens sorted by expert on NPU: ``npu_moe_token_permute`` and ``npu_moe_token_unpermute``, whose indices are
int32. Where weights are float32 and tokens 16 bits, as models have them, torch_npu would need copies of the tokens in
float32; the Triton kernel reads them as they are.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from mindspeed_fx.compat.fake import hint
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.moe_permute import (
    _choices,
    moe_permute,
    moe_permute_backward,
    moe_unpermute,
    moe_unpermute_backward,
)
from mindspeed_fx.kernels.npu import check_types, first, lowering, promote_types, within

npu = torch.ops.npu

# --------------------------------------------------------------------------- permutation of tokens


def _supports_permute(tokens, indices):
    op = "npu_moe_token_permute"
    return first(
        check_types(tokens=tokens),
        check_types((torch.int32, torch.int64), indices=indices),
        within(f"{op}: dimensions of indices", indices.dim(), 1, 2),
        within(f"{op}: elements of indices", indices.numel(), 0, 16777214),
        within(f"{op}: choices of a token", hint(indices.numel()) // max(1, hint(tokens.shape[0])), 0, 512),
    )


@lowering(moe_permute, "npu_moe_token_permute", _supports_permute, ("npu_moe_token_permute",))
def _permute(tokens, indices):
    if indices.dim() == 1:  # flattened [tokens * k]; one-dimensional indices mean k = 1 to the kernel
        indices = indices.view(tokens.shape[0], -1)
    permuted, sorted_indices = npu.npu_moe_token_permute(tokens, indices)
    return permuted, sorted_indices.to(torch.int64)


def _supports_permute_backward(grad, sorted_indices, tokens):
    return first(
        check_types(grad=grad),
        within(
            "npu_moe_token_permute_grad_v2: choices of a token",
            hint(sorted_indices.shape[0]) // max(1, hint(tokens)),
            1,
            512,
        ),
    )


@lowering(
    moe_permute_backward,
    "npu_moe_token_permute_grad_v2",
    _supports_permute_backward,
    ("npu_moe_token_permute_grad_v2",),
)
def _permute_backward(grad, sorted_indices, tokens):
    return npu.npu_moe_token_permute_grad_v2(
        grad, sorted_indices.to(torch.int32), tokens, grad.dtype, _choices(sorted_indices, tokens)
    )


def _supports_unpermute(permuted, sorted_indices, probs=None, k=1, op="npu_moe_token_unpermute"):
    return first(
        check_types(permuted=permuted, probs=probs),
        within(f"{op}: choices of a token", k if probs is None else probs.shape[1], 1, 512),
    )


def _weights(permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None, k: int) -> Tensor | None:
    """Without probs the kernel takes every token for one choice."""
    if probs is not None or (isinstance(k, int) and k == 1):
        return probs
    return permuted.new_ones(sorted_indices.shape[0] // k, k)


def _supports_one_type(permuted, sorted_indices, probs=None, k=1):
    op = "npu_moe_token_unpermute"
    if triton.missing_on_npu() is None and probs is not None and probs.dtype != permuted.dtype:
        return f"{op}: tokens are {permuted.dtype}, probs {probs.dtype}; valid: one type".replace("torch.", "")
    return _supports_unpermute(permuted, sorted_indices, probs, k, op)


@lowering(moe_unpermute, "npu_moe_token_unpermute", _supports_one_type, ("npu_moe_token_unpermute",))
def _unpermute(permuted, sorted_indices, probs=None, k=1):
    wide = permuted.to(promote_types(permuted, probs))  # the result has the type of the tokens
    return npu.npu_moe_token_unpermute(wide, sorted_indices.to(torch.int32), _weights(wide, sorted_indices, probs, k))


def _supports_unpermute_backward(grad, permuted, sorted_indices, probs, k):
    op = "npu_moe_token_unpermute_grad_v2"
    return first(check_types(grad=grad), _supports_unpermute(permuted, sorted_indices, probs, k, op))


def _supports_one_type_backward(grad, permuted, sorted_indices, probs, k):
    if triton.missing_on_npu() is None and grad.dtype != permuted.dtype:
        return f"tokens are {permuted.dtype}, their gradients {grad.dtype}; valid: one type".replace("torch.", "")
    return _supports_unpermute_backward(grad, permuted, sorted_indices, probs, k)


@lowering(
    moe_unpermute_backward,
    "npu_moe_token_unpermute_grad_v2",
    _supports_one_type_backward,
    ("npu_moe_token_unpermute_grad_v2",),
)
def _unpermute_backward(grad, permuted, sorted_indices, probs, k):
    wide = permuted.to(grad.dtype)
    weights = _weights(wide, sorted_indices, probs, k)
    rows, dprobs = npu.npu_moe_token_unpermute_grad_v2(
        grad, sorted_indices.to(torch.int32), permuted.shape[0], grad.dtype, weights, False, None, wide
    )
    return rows.to(permuted.dtype), permuted.new_empty(0) if probs is None else dprobs.to(probs.dtype)


# --------------------------------------------------------------------------- tokens and weights of two types


def _narrow(kernel: Callable, at: int) -> Callable:
    """The Triton kernel with int32 indices, which torch_npu's permutation made and its gradient reads."""
    return lambda *args: kernel(*(a.to(torch.int32) if i == at else a for i, a in enumerate(args)))


triton.on_npu(moe_unpermute, through=lambda kernel: _narrow(kernel, 1))
triton.on_npu(moe_unpermute_backward, through=lambda kernel: _narrow(kernel, 2))
lowering(moe_unpermute, "npu_moe_token_unpermute, widened", _supports_unpermute, ("npu_moe_token_unpermute",))(
    _unpermute
)
lowering(
    moe_unpermute_backward,
    "npu_moe_token_unpermute_grad_v2, widened",
    _supports_unpermute_backward,
    ("npu_moe_token_unpermute_grad_v2",),
)(_unpermute_backward)
