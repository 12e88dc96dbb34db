"""Tokens of a mixture of experts, copied and sorted by expert, and their way back.

Source: ``npu_moe_token_permute`` and ``npu_moe_token_unpermute`` of torch_npu. Each token appears once per chosen
expert; pair (t, j) is token t with its j-th choice. Both directions and both gradients only gather: nothing is
scattered with accumulation, which on CPU runs row by row and on accelerators through atomics.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_fx.compat.placements import PARTIAL, REPLICATED, Even
from mindspeed_fx.cost.operators import Cost, once, size
from mindspeed_fx.kernels import triton
from mindspeed_fx.kernels.base import LIBRARY, accumulation_dtype, operator


def _inverse(permutation: Tensor) -> Tensor:
    """The inverse of a permutation [pairs]."""
    return torch.empty_like(permutation).scatter(
        0, permutation.long(), torch.arange(permutation.shape[0], dtype=permutation.dtype, device=permutation.device)
    )


def _choices(pairs: Tensor, tokens: int | torch.SymInt) -> int | torch.SymInt:
    """How many experts each token chose; 1 where there is no token."""
    return pairs.shape[0] // tokens if tokens else 1


def _fake(tokens, indices):
    return tokens.new_empty(indices.numel(), tokens.shape[1]), indices.new_empty(indices.numel(), dtype=torch.int64)


@operator("moe_permute(Tensor tokens, Tensor indices) -> (Tensor, Tensor)", _fake)
def moe_permute(tokens: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the tokens in the order of their experts; tokens of one expert keep their order.

    Args:
        tokens: [tokens, hidden].
        indices: [tokens, k], or flattened [tokens * k], integers: the experts of each token.

    Returns:
        permuted [tokens * k, hidden] and, int64 [tokens * k], the row of ``permuted`` that holds pair t * k + j.
    """
    # A view of a flat tensor would hide from common subexpression elimination that the model sorts the same.
    order = torch.sort(indices if indices.dim() == 1 else indices.reshape(-1), stable=True)[1]
    return tokens.index_select(0, order // _choices(order, tokens.shape[0])), _inverse(order)


def _fake_backward(grad, sorted_indices, tokens):
    return grad.new_empty(tokens, grad.shape[1])


@operator("moe_permute_backward(Tensor grad, Tensor sorted_indices, SymInt tokens) -> Tensor", _fake_backward)
def moe_permute_backward(grad: Tensor, sorted_indices: Tensor, tokens: int) -> Tensor:
    """Gradient [tokens, hidden] of the tokens of :func:`moe_permute`: the sum over a token's copies."""
    return moe_unpermute.reference(grad, sorted_indices, None, _choices(sorted_indices, tokens))


def _dtype(permuted: Tensor, probs: Tensor | None) -> torch.dtype:
    return permuted.dtype if probs is None else torch.promote_types(permuted.dtype, probs.dtype)


def _fake_unpermute(permuted, sorted_indices, probs=None, k=1):
    k = k if probs is None else probs.shape[1]
    return permuted.new_empty(sorted_indices.shape[0] // k, permuted.shape[1], dtype=_dtype(permuted, probs))


@operator(
    "moe_unpermute(Tensor permuted, Tensor sorted_indices, Tensor? probs=None, SymInt k=1) -> Tensor", _fake_unpermute
)
def moe_unpermute(permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, k: int = 1) -> Tensor:
    """The sum over a token's copies, each times its probability.

    Args:
        permuted: [tokens * k, hidden], float.
        sorted_indices: int64 [tokens * k], the second result of :func:`moe_permute`.
        probs: [tokens, k], float, or None for ones.
        k: copies of each token; what ``probs`` says where it is given.

    Returns:
        [tokens, hidden], contiguous, in the common dtype of ``permuted`` and ``probs``; summed in float32 for 16 bits.
    """
    k, dtype = k if probs is None else probs.shape[1], _dtype(permuted, probs)
    copies = permuted.index_select(0, sorted_indices).unflatten(0, (-1, k)).to(accumulation_dtype(dtype))
    if probs is not None:
        copies = copies * probs.to(copies.dtype).unsqueeze(-1)
    return copies.sum(1).to(dtype)


def _fake_unpermute_backward(grad, permuted, sorted_indices, probs, k):
    return torch.empty(permuted.shape, dtype=permuted.dtype, device=permuted.device), permuted.new_empty(
        0
    ) if probs is None else probs.new_empty(probs.shape)


@operator(
    "moe_unpermute_backward(Tensor grad, Tensor permuted, Tensor sorted_indices, Tensor? probs, SymInt k) -> (Tensor, "
    "Tensor)",
    _fake_unpermute_backward,
)
def moe_unpermute_backward(
    grad: Tensor, permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """Gradients (dpermuted, dprobs) of :func:`moe_unpermute`; dprobs is empty without probs.

    The row of pair (t, j) has the gradient probs[t, j] * grad[t]; dprobs[t, j] is the inner product of grad[t] and that
    row. Without probs ``permuted`` gives shape and type alone.
    """
    order, dtype = _inverse(sorted_indices), accumulation_dtype(_dtype(permuted, probs))
    rows = grad.index_select(0, order // (k if probs is None else probs.shape[1])).to(dtype)
    if probs is None:
        return rows.to(permuted.dtype), permuted.new_empty(0)
    share = probs.reshape(-1).index_select(0, order).to(dtype)
    inner = (rows * permuted.to(dtype)).sum(1)
    return (rows * share.unsqueeze(1)).to(permuted.dtype), inner.index_select(0, sorted_indices).view(probs.shape).to(
        probs.dtype
    )


def _setup(ctx, inputs, output):
    ctx.tokens = inputs[0].shape[0]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _grad_indices):
    (sorted_indices,) = ctx.saved_tensors
    return torch.ops.mindspeed.moe_permute_backward(grad, sorted_indices, ctx.tokens), None


torch.library.register_autograd("mindspeed::moe_permute", _backward, setup_context=_setup, lib=LIBRARY)


def _setup_unpermute(ctx, inputs, output):
    permuted, sorted_indices, probs, ctx.k = inputs
    ctx.save_for_backward(None if probs is None else permuted, sorted_indices, probs)


def _backward_unpermute(ctx, grad):
    permuted, sorted_indices, probs = ctx.saved_tensors  # once: a checkpointed region unpacks them one time alone
    if probs is None:  # then the rows are not read, and were not kept
        permuted = grad.new_empty(sorted_indices.shape[0], grad.shape[1])
    dpermuted, dprobs = torch.ops.mindspeed.moe_unpermute_backward(grad, permuted, sorted_indices, probs, ctx.k)
    return (
        dpermuted if ctx.needs_input_grad[0] else None,
        None,
        dprobs if probs is not None and ctx.needs_input_grad[2] else None,
        None,
    )


torch.library.register_autograd(
    "mindspeed::moe_unpermute", _backward_unpermute, setup_context=_setup_unpermute, lib=LIBRARY
)


@moe_permute.shard
def _sharding_rule(tokens, indices):
    return [([1, REPLICATED], [1, REPLICATED])]


@moe_permute_backward.shard
def _sharding_rule_backward(grad, sorted_indices, tokens):
    return [([1], [1, REPLICATED])]


@moe_unpermute.shard
def _ways_unpermute(permuted, sorted_indices, probs=None, k=1):
    """By width, or by token: whole tokens, so that the choices of one stay together."""
    pairs = Even(0, k if probs is None else probs.shape[1])
    return [([1], [1, REPLICATED, REPLICATED]), ([0], [REPLICATED, pairs, Even(0)])]


@moe_unpermute_backward.shard
def _ways_unpermute_backward(grad, permuted, sorted_indices, probs, k):
    return [([1, REPLICATED if probs is None else PARTIAL], [1, 1, REPLICATED, REPLICATED])]


@moe_permute.costs
def _cost(out, tokens, indices):
    """Every copy reads its row; the sort passes over the indices about as often as they have bytes."""
    permuted, order = out
    return Cost(
        vector=8 * indices.numel,
        read=permuted.bytes + 8 * (indices.bytes + order.bytes),
        write=permuted.bytes + 9 * order.bytes,
    )


@moe_permute_backward.costs
def _backward_cost(out, grad, sorted_indices, tokens):
    return once(out, grad, sorted_indices, vector=grad.numel)


@moe_unpermute.costs
def _unpermute_cost(out, permuted, sorted_indices, probs=None, k=1):
    return once(out, permuted, sorted_indices, probs, vector=2 * permuted.numel)


@moe_unpermute_backward.costs
def _unpermute_backward_cost(out, grad, permuted, sorted_indices, probs, k):
    """A token's gradient is read for each of its copies, which are read too where the probabilities have gradients."""
    read = permuted.bytes * (2 if probs is not None else 1) + size(sorted_indices, probs)
    return Cost(vector=3 * permuted.numel, read=read, write=size(out) + sorted_indices.bytes)


def _refuse(permuted, probs, k, **others):
    if probs is None and not isinstance(k, int):
        return "the number of choices is symbolic"
    return triton.refuse(permuted.shape[-1], permuted=permuted, probs=probs, **others)


triton.kernel(
    moe_unpermute, _fake_unpermute, "moe_unpermute.forward", "copies added as they are found",
    lambda permuted, sorted_indices, probs=None, k=1: _refuse(permuted, probs, k), beats_codegen=False,
)  # fmt: skip
triton.kernel(
    moe_unpermute_backward, _fake_unpermute_backward, "moe_unpermute.backward", "both gradients in one read",
    lambda grad, permuted, sorted_indices, probs, k: _refuse(permuted, probs, k, grad=grad), beats_codegen=False,
)  # fmt: skip
