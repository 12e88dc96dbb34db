"""Gated linear units in Triton, SwiGLU among them: one walk over row blocks; gate and up may be strided halves of one
tensor.

Source: the formulas of mindspeed_fx/kernels/glu.py and swiglu.py. tanh is written with a sigmoid, which keeps small
    values and is one
exponential: 0.5 (1 + tanh(z)) = sigmoid(2 z).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import as_rows, launch, power_of_two, programs, warps

BLOCK = 4096
"""Most elements of a column block."""
GELU, GELU_TANH, RELU, SIGMOID, SILU = (tl.constexpr(i) for i in range(5))
CODES = {"gelu": 0, "gelu_tanh": 1, "relu": 2, "sigmoid": 3, "silu": 4}


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """(activation, its derivative) of float32 x."""
    if ACTIVATION == GELU:
        share = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        y = x * share
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == GELU_TANH:
        # 1 - share loses what is left of it near 1. Bounded, so that the exponential is finite where the share is none.
        rest = tl.exp(-tl.maximum(1.5957691216057308 * (x + 0.044715 * x * x * x), -80.0))
        share = 1.0 / (1.0 + rest)
        y = x * share
        slope = share + y * (rest * share) * (1.5957691216057308 + 0.21406444881780076 * x * x)
    elif ACTIVATION == RELU:
        y = tl.where(x <= 0.0, 0.0, x)  # NaN stays NaN, which tl.maximum makes zero
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif ACTIVATION == SILU:
        share = tl.sigmoid(x)
        y = x * share
        slope = share * (1.0 + x * (1.0 - share))
    else:
        y = tl.sigmoid(x)
        slope = y * (1.0 - y)
    return y, slope


@triton.jit
def glu_forward(
    gate_ptr,
    up_ptr,
    y_ptr,
    count,
    N: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        row = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(gate_ptr + row * GATE_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * UP_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        y, _ = activate(gate, ACTIVATION)
        tl.store(y_ptr + row * N + cols, (y * up).to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def glu_backward(
    g_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    count,
    N: tl.constexpr,
    G_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    DGATE_STRIDE: tl.constexpr,
    DUP_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        row = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + row * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * GATE_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * UP_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        y, slope = activate(gate, ACTIVATION)
        if ACTIVATION == RELU:
            dgate = tl.where(gate <= 0.0, 0.0, g * up)  # zero, be the gradient infinite or NaN
        else:
            dgate = g * up * slope
        tl.store(dgate_ptr + row * DGATE_STRIDE + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=cols < N)
        tl.store(dup_ptr + row * DUP_STRIDE + cols, (g * y).to(dup_ptr.dtype.element_ty), mask=cols < N)


def forward(x: Tensor, up: Tensor | None = None, activation: str = "silu") -> Tensor:
    """``mindspeed::glu``, and ``mindspeed::swiglu``, which names no activation: [..., ffn] contiguous of gate and up
    [..., ffn], or of the two packed in x [..., 2 * ffn].
    """
    gate, u = halves(as_rows(x), up)
    count, n = gate.shape
    y = torch.empty((*x.shape[:-1], n), dtype=torch.promote_types(gate.dtype, u.dtype), device=x.device)
    block, num_warps, grid = tile(gate)
    launch(
        glu_forward,
        grid,
        gate,
        u,
        y,
        count,
        num_warps=num_warps,
        N=n,
        GATE_STRIDE=gate.stride(0),
        UP_STRIDE=u.stride(0),
        ACTIVATION=CODES[activation],
        BLOCK=block,
    )
    return y


def backward(grad: Tensor, x: Tensor, up: Tensor | None = None, activation: str = "silu") -> tuple[Tensor, Tensor]:
    """``mindspeed::glu_backward`` and ``mindspeed::swiglu_backward``: (dx, dup) contiguous; packed inputs have one
    packed gradient and an empty dup.
    """
    g = as_rows(grad)
    gate, u = halves(as_rows(x), up)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dup = x.new_empty(0) if up is None else torch.empty(up.shape, dtype=up.dtype, device=x.device)
    dgate, du = halves(as_rows(dx), None if up is None else dup)
    block, num_warps, grid = tile(gate)
    tensors = {"G": g, "GATE": gate, "UP": u, "DGATE": dgate, "DUP": du}
    strides = {f"{name}_STRIDE": t.stride(0) for name, t in tensors.items()}
    launch(
        glu_backward,
        grid,
        *tensors.values(),
        gate.shape[0],
        num_warps=num_warps,
        N=gate.shape[1],
        **strides,
        ACTIVATION=CODES[activation],
        BLOCK=block,
    )
    return dx, dup


def halves(x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gate, up) [rows, ffn] of x [rows, ffn] and up, or of x [rows, 2 * ffn]."""
    return x.chunk(2, -1) if up is None else (x, as_rows(up))


def tile(gate: Tensor) -> tuple[int, int, int]:
    """Column block, warps and programs."""
    count, n = gate.shape
    block = min(BLOCK, power_of_two(n))
    return block, warps(block), programs(gate, count * -(-n // block), warps(block), 64)
