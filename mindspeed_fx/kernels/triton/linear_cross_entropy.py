"""One chunk of logits in Triton: losses, and the gradient of the logits in their place; two reads and one write of 16
bits each.

The first walk of a row keeps a running maximum and sum, the second writes. Source: Hsu et al. 2024, "Liger Kernel",
fused linear cross-entropy; Milakov and Gimelshein 2018 for the walk. Formulas:
mindspeed_fx/kernels/linear_cross_entropy_chunks.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_fx.kernels.triton.launch import as_rows, launch, power_of_two, programs, warps

BLOCK = 4096
"""Most logits of a block."""


@triton.jit
def softcap_tanh(x, cap, CAP: tl.constexpr):
    """cap * tanh(x / cap); tanh by an exponential of what is not positive."""
    if CAP:
        e = tl.exp(-2.0 * tl.abs(x) / cap)
        bound = cap * (1.0 - e) / (1.0 + e)
        x = tl.where(x < 0.0, -bound, bound)
    return x


@triton.jit
def cross_entropy_chunk(
    logits_ptr,
    target_ptr,
    upstream_ptr,
    loss_ptr,
    count,
    upstream_stride,
    smoothing,
    z_loss,
    cap,
    V: tl.constexpr,
    STRIDE: tl.constexpr,
    SMOOTH: tl.constexpr,
    CAP: tl.constexpr,
    UPSTREAM: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for row in range(tl.program_id(0), count, tl.num_programs(0)):
        base = logits_ptr + tl.cast(row, tl.int64) * STRIDE
        target = tl.load(target_ptr + row)
        kept = target >= 0
        is_class = tl.where(kept, tl.where(target < V, 1, 0), 0)
        top = -3.4e38
        total = 0.0
        plain = 0.0
        for start in range(0, V, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = softcap_tanh(tl.load(base + cols, mask=cols < V, other=0.0).to(tl.float32), cap, CAP)
            if SMOOTH:
                plain += tl.sum(tl.where(cols < V, x, 0.0), axis=0)
            x = tl.where(cols < V, x, float("-inf"))
            higher = tl.maximum(top, tl.max(x, axis=0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), axis=0)
            top = higher
        lse = tl.log(total) + top
        # A block of one: scalars have no hyperbolic functions on Ascend's vector cores.
        picked = tl.sum(
            softcap_tanh(
                tl.load(base + target + tl.arange(0, 16), mask=tl.arange(0, 16) < is_class, other=0.0).to(tl.float32),
                cap,
                CAP,
            ),
            axis=0,
        )
        loss = lse - (1.0 - smoothing) * picked + z_loss * lse * lse
        if SMOOTH:
            loss -= smoothing * plain / V
        loss = tl.where(target < V, loss, float("nan"))
        tl.store(loss_ptr + row, tl.where(kept, loss, 0.0))
        if GRADIENTS:
            factor = 1.0 + 2.0 * z_loss * lse
            g = 1.0
            if UPSTREAM:
                g = tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
            at = tl.cast(target, tl.int32)
            for start in range(0, V, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                x = softcap_tanh(tl.load(base + cols, mask=cols < V, other=0.0).to(tl.float32), cap, CAP)
                d = tl.exp(x - lse) * factor - smoothing / V
                d = tl.where(cols == at, d - (1.0 - smoothing), d)
                if CAP:
                    d *= 1.0 - (x / cap) * (x / cap)
                d = tl.where(kept, d * g, 0.0)  # no product with zero: logits that are not finite stay out
                tl.store(base + cols, d.to(logits_ptr.dtype.element_ty), mask=cols < V)


def chunk(
    logits: Tensor,
    target: Tensor,
    upstream: Tensor | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    gradients: bool,
) -> Tensor:
    """Losses [rows] float32 of ``logits`` [rows, vocab], which with ``gradients`` become those of sum(upstream *
    losses).

    Args:
        target: [rows], int64, classes; below zero: an ignored token, whose loss and gradients are zero. One that is no
            class has NaN for a loss.
        upstream: [rows], or None for ones.
    """
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    lines = as_rows(logits)
    if lines.data_ptr() != logits.data_ptr():
        raise NotImplementedError("linear_cross_entropy: the logits of a chunk are not rows")
    count, n = lines.shape
    block = min(BLOCK, power_of_two(n))
    args = (
        lines,
        target.contiguous(),
        losses if upstream is None else upstream,
        losses,
        count,
        1 if upstream is None else upstream.stride(0),
        label_smoothing,
        z_loss,
        softcap or 1.0,
    )
    constants = {
        "V": n,
        "STRIDE": lines.stride(0),
        "SMOOTH": bool(label_smoothing),
        "CAP": bool(softcap),
        "UPSTREAM": upstream is not None,
        "GRADIENTS": gradients,
    }
    launch(
        cross_entropy_chunk,
        programs(lines, count, warps(block), 64),
        *args,
        num_warps=warps(block),
        **constants,
        BLOCK=block,
    )
    return losses
