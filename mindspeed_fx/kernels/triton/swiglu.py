"""SwiGLU in Triton: one walk over row blocks; gate and up may be strided halves of one tensor.

Source: the formulas of mindspeed_fx/kernels/swiglu.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.glu import halves, tile
from mindspeed_fx.kernels.triton.launch import launch, rows

@triton.jit
def swiglu_forward(gate_ptr, up_ptr, y_ptr, count, N: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        row = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(gate_ptr + row * GATE_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * UP_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + cols, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def swiglu_backward(g_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, count, N: tl.constexpr, G_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr, DGATE_STRIDE: tl.constexpr, DUP_STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    for item in range(tl.program_id(0), count * BLOCKS, tl.num_programs(0)):
        row = tl.cast(item // BLOCKS, tl.int64)
        cols = (item % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + row * G_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + row * GATE_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * UP_STRIDE + cols, mask=cols < N, other=0.0).to(tl.float32)
        s = tl.sigmoid(gate)
        dgate = g * up * s * (1.0 + gate * (1.0 - s))
        tl.store(dgate_ptr + row * DGATE_STRIDE + cols, dgate.to(dgate_ptr.dtype.element_ty), mask=cols < N)
        tl.store(dup_ptr + row * DUP_STRIDE + cols, (g * gate * s).to(dup_ptr.dtype.element_ty), mask=cols < N)


def forward(x: Tensor, up: Tensor | None = None) -> Tensor:
    """``mindspeed::swiglu``: [..., ffn] contiguous of gate and up [..., ffn], or of the two packed in x [..., 2 * ffn]."""
    gate, u = halves(rows(x), up)
    count, n = gate.shape
    y = torch.empty((*x.shape[:-1], n), dtype=torch.promote_types(gate.dtype, u.dtype), device=x.device)
    block, num_warps, grid = tile(gate)
    launch(swiglu_forward, grid, gate, u, y, count, num_warps=num_warps, N=n, GATE_STRIDE=gate.stride(0), UP_STRIDE=u.stride(0), BLOCK=block)
    return y


def backward(grad: Tensor, x: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``mindspeed::swiglu_backward``: (dx, dup) contiguous; packed inputs have one packed gradient and an empty dup."""
    g = rows(grad)
    gate, u = halves(rows(x), up)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dup = x.new_empty(0) if up is None else torch.empty(up.shape, dtype=up.dtype, device=x.device)
    dgate, du = halves(rows(dx), None if up is None else dup)
    block, num_warps, grid = tile(gate)
    tensors = {"G": g, "GATE": gate, "UP": u, "DGATE": dgate, "DUP": du}
    strides = {f"{name}_STRIDE": t.stride(0) for name, t in tensors.items()}
    launch(swiglu_backward, grid, *tensors.values(), gate.shape[0], num_warps=num_warps, N=gate.shape[1], **strides, BLOCK=block)
    return dx, dup
