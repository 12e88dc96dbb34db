"""Attention on CPU, causal: ATen's flash kernel, blocks of rows, and our flash kernel in C++, interleaved.

python -m benchmarks.attention_cpu --rounds 15 --dtype float32
"""

from __future__ import annotations

import statistics

import torch

import mindspeed_fx.kernels  # noqa: F401
from benchmarks import common

SHAPES = [
    (2, 8, 8, 64, 64),
    (2, 8, 8, 128, 64),
    (2, 8, 8, 256, 64),
    (2, 8, 4, 512, 64),
    (8, 8, 4, 512, 64),
    (1, 32, 8, 512, 128),
    (1, 8, 4, 1024, 64),
    (1, 8, 1, 2048, 64),
    (1, 8, 8, 4096, 64),
]
aten, ops = torch.ops.aten, torch.ops.mindspeed


def main() -> None:
    args = common.arguments(rounds=15, dtype="float32")
    dtype = getattr(torch, args.dtype)
    common.header(f"attention, causal, {args.dtype}; ratios are those of our kernel")
    print(
        f"{'':<9}{'batch, heads, kv heads, seq, dim':<34}{'flash ms':>10}{'blocks ms':>11}{'own ms':>9}"
        f"{'own/flash':>11}{'own/blocks':>12}"
    )
    for batch, heads, kv_heads, seq, dim in SHAPES:
        q, grad = (torch.randn(batch, seq, heads, dim).to(dtype).transpose(1, 2) for _ in range(2))
        k, v = (torch.randn(batch, seq, kv_heads, dim).to(dtype).transpose(1, 2) for _ in range(2))
        scale = dim**-0.5
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        forward = {
            "flash": lambda: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale),
            "blocks": lambda: ops.attention_blocked(q, k, v, scale),
            "own": lambda: ops.attention_flash(q, k, v, True, scale),
        }
        backward = {
            "flash": lambda: aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, True, scale=scale
            ),
            "blocks": lambda: ops.attention_blocked_backward(grad, q, k, v, out, lse, scale),
            "own": lambda: ops.attention_flash_backward(grad, q, k, v, out, lse, True, scale),
        }
        for side, rivals in (("forward", forward), ("backward", backward)):
            flash, blocks, own = (statistics.median(t) * 1e3 for t in common.interleaved(rivals, args.rounds).values())
            print(
                f"{side:<9}{str((batch, heads, kv_heads, seq, dim)):<34}{flash:>10.2f}{blocks:>11.2f}{own:>9.2f}"
                f"{own / flash:>11.3f}{own / blocks:>12.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
