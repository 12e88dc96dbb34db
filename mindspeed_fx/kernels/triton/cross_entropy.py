"""Cross-entropy in Triton: the forward reads the logits once with a running maximum, the backward reads and writes
once.

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax". The running maximum is one number per
lane, of DEEP logits at a time, so that threads wait for each other once a row: nine exponentials for eight logits keep
the special function units below the memory's pace. On an NPU, whose vectors want long sums, a row has one lane.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import as_rows, launch, only_cuda, power_of_two, programs, warps

BLOCK = 4096
"""Most logits of a block."""

DEEP = 8
"""Logits of a lane at a time: a load of 16 bytes in 16 bits."""


@triton.jit
def cross_entropy_forward(
    logits_ptr,
    target_ptr,
    loss_ptr,
    lse_ptr,
    count,
    target_stride,
    ignore_index,
    smoothing,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    EACH: tl.constexpr = BLOCK // LANES
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        base = logits_ptr + tl.cast(row, tl.int64) * STRIDE
        # Finite, so that a block of nothing but -inf (a masked vocabulary) leaves the sum at zero instead of NaN.
        top = tl.full([LANES], -3.4e38, tl.float32)
        total = tl.zeros([LANES], tl.float32)
        plain = tl.zeros([LANES], tl.float32)
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
            x = tl.load(base + cols, mask=cols < V, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, axis=1))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher[:, None]), axis=1)
            top = higher
            if SMOOTH:
                plain += tl.sum(tl.where(cols < V, x, 0.0), axis=1)
        highest = tl.max(top, axis=0)
        lse = tl.log(tl.sum(total * tl.exp(top - highest), axis=0)) + highest
        target = tl.load(target_ptr + tl.cast(row, tl.int64) * target_stride)
        # A target outside the vocabulary gives NaN; ATen stops the device there.
        picked = tl.load(base + target, mask=(target >= 0) & (target < V), other=float("nan")).to(tl.float32)
        loss = lse - picked
        if SMOOTH:
            loss = (1.0 - smoothing) * loss + smoothing * (lse - tl.sum(plain, axis=0) / V)
        tl.store(loss_ptr + row, tl.where(target != ignore_index, loss, 0.0))
        tl.store(lse_ptr + row, lse)


@triton.jit
def cross_entropy_backward(
    g_ptr,
    logits_ptr,
    target_ptr,
    lse_ptr,
    d_ptr,
    count,
    g_stride,
    target_stride,
    ignore_index,
    smoothing,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        row = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + row * target_stride)
        g = tl.load(g_ptr + row * g_stride)
        g = tl.where(target != ignore_index, g, 0.0)
        x = tl.load(logits_ptr + row * STRIDE + cols, mask=cols < V, other=0.0).to(tl.float32)
        p = tl.exp(x - tl.load(lse_ptr + row)) - smoothing / V
        p = tl.where(cols == tl.cast(target, tl.int32), p - (1.0 - smoothing), p)
        tl.store(d_ptr + row * V + cols, (p * g).to(d_ptr.dtype.element_ty), mask=cols < V)


def forward(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> tuple[Tensor, Tensor]:
    """``mindspeed::cross_entropy``: loss and log-sum-exp [tokens] float32 of logits [tokens, vocab] and target
    [tokens].
    """
    loss, lse = (logits.new_empty(target.shape, dtype=torch.float32) for _ in range(2))
    logits = as_rows(logits)
    count, n = logits.shape
    block = min(BLOCK, power_of_two(n))
    num_warps = warps(block)
    grid = programs(logits, count, num_warps, None)
    args = (logits, target, loss, lse, count, target.stride(0), ignore_index, label_smoothing)
    launch(
        cross_entropy_forward,
        grid,
        *args,
        num_warps=num_warps,
        V=n,
        STRIDE=logits.stride(0),
        SMOOTH=bool(label_smoothing),
        LANES=max(1, block // DEEP) if only_cuda(logits) else 1,
        BLOCK=block,
    )
    return loss, lse


def backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float
) -> Tensor:
    """``mindspeed::cross_entropy_backward``: gradient of the logits [tokens, vocab], contiguous, in their type."""
    d = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    logits = as_rows(logits)
    count, n = logits.shape
    block = min(BLOCK, power_of_two(n))
    grid = programs(logits, count * -(-n // block), warps(block), 64)
    args = (
        grad,
        logits,
        target,
        lse.contiguous(),
        d,
        count,
        grad.stride(0),
        target.stride(0),
        ignore_index,
        label_smoothing,
    )
    launch(cross_entropy_backward, grid, *args, num_warps=warps(block), V=n, STRIDE=logits.stride(0), BLOCK=block)
    return d
