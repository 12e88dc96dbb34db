"""CPU kernels of torch_npu's permutation of tokens by expert."""

from __future__ import annotations

import torch

from mindspeed_fx.kernels.npu.emulation.registry import emulation

# --------------------------------------------------------------------------- permutation of tokens


def _rows(indices, num_out_tokens):
    n = num_out_tokens or 0
    return min(n, indices.numel()) if n > 0 else indices.numel() + n


def _fake_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    return tokens.new_empty(_rows(indices, num_out_tokens), tokens.shape[1]), tokens.new_empty(
        indices.numel(), dtype=torch.int32
    )


def _setup_permute(ctx, inputs, output):
    tokens, indices, _, ctx.padded = inputs
    ctx.tokens, ctx.dtype = tokens.shape[0], tokens.dtype
    ctx.k = 1 if indices.dim() == 1 else indices.shape[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _backward_permute(ctx, grad, _):
    return (
        torch.ops.npu.npu_moe_token_permute_grad_v2(
            grad, ctx.saved_tensors[0], ctx.tokens, ctx.dtype, ctx.k, ctx.padded
        ),
        None,
        None,
        None,
    )


@emulation("npu_moe_token_permute", _fake_permute, _setup_permute, _backward_permute)
def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    """(permuted, sorted_indices int32): permuted[sorted_indices[i]] = tokens[i // k], sorted by expert, stable."""
    assert not padded_mode
    k = 1 if indices.dim() == 1 else indices.shape[1]
    order = torch.argsort(indices.reshape(-1), stable=True)
    return tokens[order[: _rows(indices, num_out_tokens)] // k], torch.argsort(order).to(torch.int32)


def _gather(rows, sorted_indices):
    """rows[sorted_indices] in float32; zero for pairs that were dropped."""
    index = sorted_indices.long()
    out = rows.float()[index.clamp(max=rows.shape[0] - 1)]
    return out.masked_fill((index >= rows.shape[0])[:, None], 0.0)


@emulation(
    "npu_moe_token_permute_grad_v2",
    lambda grad, sorted_indices, tokens_size_0, tokens_dtype, num_topK, padded_mode=False: grad.new_empty(
        tokens_size_0, grad.shape[1], dtype=tokens_dtype
    ),
)
def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens, sorted_indices, tokens_size_0, tokens_dtype, num_topK, padded_mode=False
):
    """[tokens, hidden]: the sum over the copies of each token."""
    return _gather(grad_permuted_tokens, sorted_indices).view(tokens_size_0, num_topK, -1).sum(1).to(tokens_dtype)


def _fake_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    return permuted_tokens.new_empty(
        sorted_indices.shape[0] // (1 if probs is None else probs.shape[1]), permuted_tokens.shape[1]
    )


def _setup_unpermute(ctx, inputs, output):
    permuted, sorted_indices, probs, ctx.padded, ctx.shape = inputs
    ctx.save_for_backward(permuted, sorted_indices, probs)


def _backward_unpermute(ctx, grad, *_):
    permuted, sorted_indices, probs = ctx.saved_tensors
    grads = torch.ops.npu.npu_moe_token_unpermute_grad_v2(
        grad, sorted_indices, permuted.shape[0], permuted.dtype, probs, ctx.padded, ctx.shape, permuted
    )
    return grads[0], None, None if probs is None else grads[1], None, None


@emulation("npu_moe_token_unpermute", _fake_unpermute, _setup_unpermute, _backward_unpermute)
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """out[t] = sum over j of probs[t, j] * permuted[sorted_indices[t * k + j]]; without probs k is 1."""
    assert not padded_mode and sorted_indices.dtype == torch.int32, (
        f"npu_moe_token_unpermute: sorted_indices is {sorted_indices.dtype}"
    )
    k = 1 if probs is None else probs.shape[1]
    copies = _gather(permuted_tokens, sorted_indices).view(-1, k, permuted_tokens.shape[1])
    return (copies if probs is None else copies * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


@emulation(
    "_npu_moe_token_unpermute",
    lambda permuted_tokens, *args, **kwargs: (
        _fake_unpermute(permuted_tokens, *args, **kwargs),
        torch.empty_like(permuted_tokens),
    ),
)
def _npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """The same, with the tokens that the backward needs."""
    return npu_moe_token_unpermute(
        permuted_tokens, sorted_indices, probs, padded_mode, restore_shape
    ), permuted_tokens.clone()


def _fake_unpermute_grad(
    grad,
    sorted_indices,
    permuted_tokens_size_0,
    permuted_tokens_dtype,
    probs=None,
    padded_mode=False,
    restore_shape=None,
    permuted_tokens=None,
):
    return grad.new_empty(permuted_tokens_size_0, grad.shape[1], dtype=permuted_tokens_dtype), grad.new_empty(
        0
    ) if probs is None else torch.empty_like(probs)


@emulation("npu_moe_token_unpermute_grad_v2", _fake_unpermute_grad)
def npu_moe_token_unpermute_grad_v2(
    grad_unpermuted_tokens,
    sorted_indices,
    permuted_tokens_size_0,
    permuted_tokens_dtype,
    probs=None,
    padded_mode=False,
    restore_shape=None,
    permuted_tokens=None,
):
    """(dpermuted, dprobs): dpermuted[sorted_indices[t * k + j]] = probs[t, j] * grad[t], dprobs[t, j] = <grad[t], that
    row>.
    """
    k = 1 if probs is None else probs.shape[1]
    g = grad_unpermuted_tokens.float().repeat_interleave(k, 0)
    index = sorted_indices.long()
    kept = index < permuted_tokens_size_0
    rows = g if probs is None else g * probs.float().reshape(-1, 1)
    out = g.new_full((permuted_tokens_size_0, g.shape[1]), float("nan"))
    out[index[kept]] = rows[kept]
    if probs is None:
        return out.to(permuted_tokens_dtype), g.new_empty(0)
    dprobs = (g * _gather(permuted_tokens, sorted_indices)).sum(1).view(probs.shape)
    return out.to(permuted_tokens_dtype), dprobs.to(probs.dtype)
