"""The weighted sum over a token's copies in Triton, and its gradients: rows are found by one index each, and read
whole.

Nothing is accumulated in memory: the indices are a permutation, so that every row of the gradient is written once.
Source: the formulas of mindspeed_fx/kernels/moe_permute.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import as_rows, launch, power_of_two, programs, warps

BLOCK = 4096
"""Most elements of a column block."""


@triton.jit
def moe_combine_forward(
    permuted_ptr,
    index_ptr,
    probs_ptr,
    y_ptr,
    count,
    N: tl.constexpr,
    STRIDE: tl.constexpr,
    K: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        token = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([BLOCK], tl.float32)
        for j in range(0, K):
            row = tl.cast(tl.load(index_ptr + token * K + j), tl.int64)
            x = tl.load(permuted_ptr + row * STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            if PROBS:
                x *= tl.load(probs_ptr + token * K + j).to(tl.float32)
            total += x
        tl.store(y_ptr + token * N + cols, total.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def moe_combine_backward(
    g_ptr,
    permuted_ptr,
    index_ptr,
    probs_ptr,
    dx_ptr,
    dprobs_ptr,
    pairs,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    K: tl.constexpr,
    PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for pair in range(tl.program_id(0), pairs, tl.num_programs(0)):
        at = tl.cast(pair, tl.int64)
        token = tl.cast(pair // K, tl.int64)
        row = tl.cast(tl.load(index_ptr + at), tl.int64)
        share = 1.0
        if PROBS:
            share = tl.load(probs_ptr + at).to(tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, N, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            g = tl.load(g_ptr + token * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * N + cols, (g * share).to(dx_ptr.dtype.element_ty), mask=cols < N)
            if PROBS:
                products += g * tl.load(permuted_ptr + row * STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        if PROBS:
            tl.store(dprobs_ptr + at, tl.sum(products, axis=0).to(dprobs_ptr.dtype.element_ty))


def forward(permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, k: int = 1) -> Tensor:
    """``mindspeed::moe_unpermute``: [tokens, hidden] contiguous."""
    k, dtype = (
        (k, permuted.dtype) if probs is None else (probs.shape[1], torch.promote_types(permuted.dtype, probs.dtype))
    )
    lines, n = as_rows(permuted), permuted.shape[1]
    y = permuted.new_empty((sorted_indices.shape[0] // k, n), dtype=dtype)
    block = min(BLOCK, power_of_two(n))
    grid = programs(lines, y.shape[0] * -(-n // block), warps(block), 64)
    args = (lines, sorted_indices.contiguous(), lines if probs is None else probs.contiguous(), y, y.shape[0])
    launch(
        moe_combine_forward,
        grid,
        *args,
        num_warps=warps(block),
        N=n,
        STRIDE=lines.stride(0),
        K=k,
        PROBS=probs is not None,
        BLOCK=block,
    )
    return y


def backward(
    grad: Tensor, permuted: Tensor, sorted_indices: Tensor, probs: Tensor | None, k: int
) -> tuple[Tensor, Tensor]:
    """``mindspeed::moe_unpermute_backward``: (dpermuted, dprobs), dprobs empty without probs."""
    k = k if probs is None else probs.shape[1]
    g, lines, n = as_rows(grad), as_rows(permuted), permuted.shape[1]
    dx = torch.empty(permuted.shape, dtype=permuted.dtype, device=permuted.device)
    dprobs = permuted.new_empty(0) if probs is None else probs.new_empty(probs.shape)
    block = min(BLOCK, power_of_two(n))
    args = (
        g,
        lines,
        sorted_indices.contiguous(),
        lines if probs is None else probs.contiguous(),
        dx,
        dprobs,
        sorted_indices.shape[0],
    )
    constants = {"N": n, "G_STRIDE": g.stride(0), "STRIDE": lines.stride(0), "K": k, "PROBS": probs is not None}
    launch(
        moe_combine_backward,
        programs(lines, sorted_indices.shape[0], warps(block), 64),
        *args,
        num_warps=warps(block),
        **constants,
        BLOCK=block,
    )
    return dx, dprobs
