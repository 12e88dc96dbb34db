"""Sinkhorn's algorithm in Triton, and its gradient: matrices [N, N] of a tile lie side by side on chip from the softmax
to the last division.

Formulas as at the top of mindspeed_fx/kernels/sinkhorn_knopp.py. The gradient makes the result and the sums again,
which a second kernel reads last first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels import sinkhorn_knopp as definition
from mindspeed_fx.kernels.triton.launch import launch, programs

TILE = 2048
"""Elements of a tile."""
WARPS = 4


@triton.jit
def matrices_of(ptr, first, count, N: tl.constexpr, MATRICES: tl.constexpr):
    """Matrices that follow each other in memory, as [N, N, MATRICES] in float32."""
    lines, cols = tl.arange(0, MATRICES)[:, None], tl.arange(0, N * N)[None, :]
    at = ptr + tl.cast(first, tl.int64) * (N * N) + lines * (N * N) + cols
    tile = tl.load(at, mask=(lines < count - first) & (cols >= 0), other=0.0).to(tl.float32)
    return tl.reshape(tl.trans(tile), (N, N, MATRICES))


@triton.jit
def put_matrices(ptr, x, first, count, N: tl.constexpr, MATRICES: tl.constexpr):
    lines, cols = tl.arange(0, MATRICES)[:, None], tl.arange(0, N * N)[None, :]
    at = ptr + tl.cast(first, tl.int64) * (N * N) + lines * (N * N) + cols
    tile = tl.trans(tl.reshape(x, (N * N, MATRICES)))
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=(lines < count - first) & (cols >= 0))


@triton.jit
def sums_at(ptr, turn, first, count, N: tl.constexpr, MATRICES: tl.constexpr):
    """Where the sums of a turn [N, MATRICES] lie."""
    base = ptr + tl.cast(turn, tl.int64) * N * count + first
    return base + tl.arange(0, N)[:, None] * count + tl.arange(0, MATRICES)[None, :]


@triton.jit
def sinkhorn_turns(
    x_ptr, y_ptr, sums_ptr, count, iterations, eps, N: tl.constexpr, KEEP: tl.constexpr, MATRICES: tl.constexpr
):  # fmt: skip
    """The result; with KEEP the sums of each turn [turns, N, count], too."""
    for first in range(tl.program_id(0) * MATRICES, count, tl.num_programs(0) * MATRICES):
        inside = (tl.arange(0, MATRICES)[None, :] < count - first) & (tl.arange(0, N)[:, None] >= 0)
        y = matrices_of(x_ptr, first, count, N, MATRICES)
        y = tl.exp(y - tl.max(y, axis=1)[:, None, :])
        y = y / tl.sum(y, axis=1)[:, None, :] + eps
        total = tl.sum(y, axis=0) + eps
        y /= total[None, :, :]
        if KEEP:
            tl.store(sums_at(sums_ptr, 0, first, count, N, MATRICES), total, mask=inside)
        for turn in range(1, iterations):
            total = tl.sum(y, axis=1) + eps
            y /= total[:, None, :]
            if KEEP:
                tl.store(sums_at(sums_ptr, 2 * turn - 1, first, count, N, MATRICES), total, mask=inside)
            total = tl.sum(y, axis=0) + eps
            y /= total[None, :, :]
            if KEEP:
                tl.store(sums_at(sums_ptr, 2 * turn, first, count, N, MATRICES), total, mask=inside)
        put_matrices(y_ptr, y, first, count, N, MATRICES)


@triton.jit
def sinkhorn_back(
    grad_ptr, y_ptr, sums_ptr, dx_ptr, count, iterations, eps, N: tl.constexpr, MATRICES: tl.constexpr
):  # fmt: skip
    """The gradient of x, from the result and the sums of each turn."""
    for first in range(tl.program_id(0) * MATRICES, count, tl.num_programs(0) * MATRICES):
        inside = (tl.arange(0, MATRICES)[None, :] < count - first) & (tl.arange(0, N)[:, None] >= 0)
        grad = matrices_of(grad_ptr, first, count, N, MATRICES)
        y = matrices_of(y_ptr, first, count, N, MATRICES)
        for i in range(1, iterations):
            turn = iterations - i
            total = tl.load(sums_at(sums_ptr, 2 * turn, first, count, N, MATRICES), mask=inside, other=1.0)
            grad = (grad - tl.sum(grad * y, axis=0)[None, :, :]) / total[None, :, :]
            y *= total[None, :, :]
            total = tl.load(sums_at(sums_ptr, 2 * turn - 1, first, count, N, MATRICES), mask=inside, other=1.0)
            grad = (grad - tl.sum(grad * y, axis=1)[:, None, :]) / total[:, None, :]
            y *= total[:, None, :]
        total = tl.load(sums_at(sums_ptr, 0, first, count, N, MATRICES), mask=inside, other=1.0)
        grad = (grad - tl.sum(grad * y, axis=0)[None, :, :]) / total[None, :, :]
        y = y * total[None, :, :] - eps
        put_matrices(dx_ptr, (grad - tl.sum(grad * y, axis=1)[:, None, :]) * y, first, count, N, MATRICES)


def forward(x: Tensor, iterations: int, eps: float) -> Tensor:
    """``mindspeed::sinkhorn_knopp``."""
    definition.check(x, iterations)
    x, y = x.contiguous(), definition.fake(x, iterations, eps)
    _turns(x, y, y, iterations, eps, False)
    return y


def backward(grad: Tensor, x: Tensor, iterations: int, eps: float) -> Tensor:
    """``mindspeed::sinkhorn_knopp_backward``."""
    definition.check(x, iterations)
    grad, x, dx = grad.contiguous(), x.contiguous(), definition.fake(x, iterations, eps)
    n, count = x.shape[-1], _count(x)
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    sums = torch.empty((2 * iterations - 1, n, count), dtype=torch.float32, device=x.device)
    _turns(x, y, sums, iterations, eps, True)
    number = -(-count // _matrices(n))
    launch(
        sinkhorn_back,
        programs(x, number, WARPS, 16),
        grad, y, sums, dx, count, iterations, eps, num_warps=WARPS, N=n, MATRICES=_matrices(n),
    )  # fmt: skip
    return dx


def _turns(x: Tensor, y: Tensor, sums: Tensor, iterations: int, eps: float, keep: bool) -> None:
    n, count = x.shape[-1], _count(x)
    launch(
        sinkhorn_turns,
        programs(x, -(-count // _matrices(n)), WARPS, 16),
        x, y, sums, count, iterations, eps, num_warps=WARPS, N=n, KEEP=keep, MATRICES=_matrices(n),
    )  # fmt: skip


def _count(x: Tensor) -> int:
    return x.numel() // (x.shape[-1] * x.shape[-1])


def _matrices(n: int) -> int:
    return max(16, TILE // (n * n))
