"""What Triton kernels share that go through a sequence with a state, tile of tokens by tile of tokens: products in the
type of the arguments or in full float32, tokens read by tile, and the decays inside a tile.

Bases are scalars of 64 bits and offsets inside a tile of 32; what lies beyond the sequence is read as zeros, which
leave a state alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 8
FEWER = {"ssd_step_gradients": 2, "ssd_group_gradients": 4, "delta_rule_chunks": 2, "delta_rule_query_gradients": 4,
         "delta_rule_key_gradients": 4}  # fmt: skip
"""Warps of kernels whose tiles do not wait for each other, in 16 bits: 0.51 to 0.68 of their time with WARPS, or with
four of ssd_step_gradients (benchmarks/results/2026-11-27-gpu_sweeps.txt)."""
STAGES = tl.constexpr(1)
"""Tiles on their way at a time: with two, programs take more shared memory than some devices have."""
ASCEND = tl.constexpr("ascend" in triton.backends.backends)
EXACT = tl.constexpr("ieee" if ASCEND.value else "tf32x3")
"""Products of float32: three of tensor cores' for one on cuda, which hardly differ."""


def is_narrow(dtype: torch.dtype, x: Tensor) -> bool:
    """Whether products are of operands in ``dtype``, of 16 bits; the interpreter takes them in float32."""
    interpreted = x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return dtype != torch.float32 and not interpreted


def warps_of(kernel: Any, narrow: bool) -> int:
    """Warps of ``kernel``; ``narrow``: its products are of operands of 16 bits."""
    return FEWER.get(kernel.fn.__name__, WARPS) if narrow else WARPS


@triton.jit
def product(a, b, NARROW: tl.constexpr, TYPE: tl.constexpr):
    """a @ b in float32: of operands in TYPE with NARROW, else of float32 in full precision."""
    if NARROW:
        out = tl.dot(a.to(TYPE), b.to(TYPE))
    else:
        out = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=EXACT)
    return out


@triton.jit
def rows_of(base, stride, first, seq, low, WIDTH: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of tokens [T, COLUMNS], zeros beyond the sequence and the width; ``base`` is the first token's."""
    rows, cols = tl.arange(0, T)[:, None], low + tl.arange(0, COLUMNS)[None, :]
    start = base + tl.cast(first, tl.int64) * stride
    return tl.load(start + rows * stride + cols, mask=(rows < seq - first) & (cols < WIDTH), other=0.0)


@triton.jit
def put_rows(base, stride, first, seq, low, x, WIDTH: tl.constexpr, T: tl.constexpr, COLUMNS: tl.constexpr):
    """Write x [T, COLUMNS] where :func:`rows_of` would read it, in the type that lies there."""
    rows, cols = tl.arange(0, T)[:, None], low + tl.arange(0, COLUMNS)[None, :]
    start = base + tl.cast(first, tl.int64) * stride
    tl.store(start + rows * stride + cols, x.to(base.dtype.element_ty), mask=(rows < seq - first) & (cols < WIDTH))


@triton.jit
def numbers_of(base, stride, first, seq, T: tl.constexpr):
    """One number of each token of a tile [T], in float32; zeros beyond the sequence."""
    rows = tl.arange(0, T)
    start = base + tl.cast(first, tl.int64) * stride
    return tl.load(start + rows * stride, mask=rows < seq - first, other=0.0).to(tl.float32)


@triton.jit
def last_of(c, T: tl.constexpr):
    """The last number of c [T]."""
    return tl.sum(tl.where(tl.arange(0, T) == T - 1, c, 0.0), axis=0)


@triton.jit
def decays(c, T: tl.constexpr):
    """e^(c_i - c_j) for i >= j, else 0, of sums c [T]."""
    rows, cols = tl.arange(0, T)[:, None], tl.arange(0, T)[None, :]
    return tl.exp(tl.where(rows >= cols, c[:, None] - c[None, :], float("-inf")))


@triton.jit
def sums(x, ones, T: tl.constexpr):
    """ones [T, T] @ x [T]. For an NPU a product of tiles: as a sum of masked rows it has eight times the buffers there,
    and as a product it spills registers elsewhere."""
    if ASCEND:
        columns = tl.arange(0, 16)[None, :]
        out = tl.sum(tl.dot(ones, tl.where(columns == 0, x[:, None], 0.0), input_precision=EXACT), axis=1)
    else:
        out = tl.sum(ones * x[None, :], axis=1)
    return out


@triton.jit
def sums_before(x, T: tl.constexpr):
    """The sum of x [T] up to each of its numbers, that one included."""
    return sums(x, tl.where(tl.arange(0, T)[:, None] >= tl.arange(0, T)[None, :], 1.0, 0.0), T)


@triton.jit
def sums_after(x, T: tl.constexpr):
    """The sum of x [T] from each of its numbers on, that one included."""
    return sums(x, tl.where(tl.arange(0, T)[:, None] <= tl.arange(0, T)[None, :], 1.0, 0.0), T)
