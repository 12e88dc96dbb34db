"""One AdamW step of a flat buffer in Triton: one walk, every tensor read once and written once.

Source: the formulas of mindspeed_fx/kernels/adamw.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import launch, power_of_two, programs, warps

BLOCK = 2048
"""Most elements of a block: seven tensors go through the registers."""


@triton.jit
def adamw_step(
    w_ptr,
    g_ptr,
    m_ptr,
    v_ptr,
    copy_ptr,
    count,
    rate,
    decay,
    beta1,
    beta2,
    eps,
    correction,
    grad_scale,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = (count + BLOCK - 1) // BLOCK
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * BLOCK
        cols = tl.arange(0, BLOCK)
        mask = cols < count - first
        g = tl.load(g_ptr + first + cols, mask=mask, other=0.0).to(tl.float32) * grad_scale
        m = tl.load(m_ptr + first + cols, mask=mask, other=0.0)
        m += (g - m) * (1.0 - beta1)
        v = tl.load(v_ptr + first + cols, mask=mask, other=0.0) * beta2 + g * g * (1.0 - beta2)
        w = tl.load(w_ptr + first + cols, mask=mask, other=0.0) * decay - rate * (m / (tl.sqrt(v) * correction + eps))
        tl.store(m_ptr + first + cols, m, mask=mask)
        tl.store(v_ptr + first + cols, v, mask=mask)
        tl.store(w_ptr + first + cols, w, mask=mask)
        if COPY:
            tl.store(copy_ptr + first + cols, w.to(copy_ptr.dtype.element_ty), mask=mask)


def step(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None, *numbers: float
) -> None:
    """The step of :func:`mindspeed_fx.kernels.adamw.adamw_`, in place; ``numbers`` as its reference takes them."""
    count = len(weight)
    block = min(BLOCK, power_of_two(count))
    args = (weight, grad, exp_avg, exp_avg_sq, weight if copy is None else copy, count, *numbers)
    launch(
        adamw_step,
        programs(weight, -(-count // block), warps(block), 64),
        *args,
        num_warps=warps(block),
        COPY=copy is not None,
        BLOCK=block,
    )
