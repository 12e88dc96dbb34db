"""Bias, dropout and residual addition in Triton: one walk over row blocks; the mask is computed from seed and place.

The mixing is that of mindspeed_fx/kernels/dropout_add_seeded.py, in 32-bit words, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.dropout_add_seeded import FIRST, SECOND, threshold
from mindspeed_fx.kernels.triton.launch import as_rows, launch, power_of_two, programs, warps

BLOCK = 4096
"""Most elements of a column block."""


@triton.jit
def draw(index, low, high, A: tl.constexpr, B: tl.constexpr):
    """Number of the elements at ``index``, uint32, as float32 in [0, 2**24)."""
    x = index ^ low
    x = (x ^ (x >> 15)) * A + high
    x = (x ^ (x >> 12)) * B
    # Below 2**24 a signed integer says the same, and has a conversion to float32 everywhere.
    return ((x ^ (x >> 15)) >> 8).to(tl.int32).to(tl.float32)


@triton.jit
def dropout_add_forward(
    x_ptr,
    bias_ptr,
    residual_ptr,
    seed_ptr,
    y_ptr,
    count,
    least,
    scale,
    N: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    low = tl.load(seed_ptr).to(tl.uint32)
    high = tl.load(seed_ptr + 1).to(tl.uint32)
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        row = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        first = tl.cast(row * N, tl.uint32)
        number = draw(first + cols.to(tl.uint32), low, high, A, B)
        y = tl.load(x_ptr + row * X_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
        y = tl.where(number >= least, y * scale, 0.0)
        y += tl.load(residual_ptr + row * RESIDUAL_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def dropout_add_backward(
    g_ptr,
    seed_ptr,
    dx_ptr,
    count,
    least,
    scale,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    low = tl.load(seed_ptr).to(tl.uint32)
    high = tl.load(seed_ptr + 1).to(tl.uint32)
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        row = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        first = tl.cast(row * N, tl.uint32)
        number = draw(first + cols.to(tl.uint32), low, high, A, B)
        g = tl.load(g_ptr + row * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(
            dx_ptr + row * N + cols,
            tl.where(number >= least, g * scale, 0.0).to(dx_ptr.dtype.element_ty),
            mask=cols < N,
        )


def forward(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor, p: float) -> Tensor:
    """``mindspeed::dropout_add_seeded``: [..., hidden] contiguous, in the type of the residual."""
    y = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    lines, others = as_rows(x), as_rows(residual)
    args = (
        lines,
        lines if bias is None else bias.contiguous(),
        others,
        seed,
        y,
        lines.shape[0],
        float(threshold(p)),
        1 / (1 - p),
    )
    _run(
        dropout_add_forward,
        lines,
        *args,
        X_STRIDE=lines.stride(0),
        RESIDUAL_STRIDE=others.stride(0),
        BIAS=bias is not None,
    )
    return y


def backward(grad: Tensor, seed: Tensor, p: float) -> Tensor:
    """``mindspeed::dropout_add_seeded_backward``: dx [..., hidden] contiguous."""
    dx = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    g = as_rows(grad)
    _run(dropout_add_backward, g, g, seed, dx, g.shape[0], float(threshold(p)), 1 / (1 - p), G_STRIDE=g.stride(0))
    return dx


def _run(kernel, lines: Tensor, *args, **constants) -> None:
    count, n = lines.shape
    block = min(BLOCK, power_of_two(n))
    launch(
        kernel,
        programs(lines, count * -(-n // block), warps(block), 64),
        *args,
        num_warps=warps(block),
        N=n,
        **constants,
        A=FIRST,
        B=SECOND,
        BLOCK=block,
    )
