"""Attention's backward on CPU: our blocks of rows against ATen's flash kernel, over sequence lengths, interleaved.

    python benchmarks/attention_cpu.py --rounds 15
"""

from __future__ import annotations

import statistics

import torch

import common
import mindspeed_fx.kernels  # noqa: F401

SHAPES = [(2, 8, 8, 128, 64), (2, 8, 8, 256, 64), (2, 8, 4, 512, 64), (8, 8, 4, 512, 64), (1, 32, 8, 512, 128), (2, 8, 4, 768, 64), (1, 8, 4, 960, 64), (1, 8, 4, 1024, 64), (1, 8, 4, 2048, 64)]


def main() -> None:
    args = common.arguments(rounds=15)
    common.header("attention backward, causal, float32")
    print(f"{'batch, heads, kv heads, seq, dim':<36}{'flash ms':>10}{'blocks ms':>11}{'ratio':>8}")
    for batch, heads, kv_heads, seq, dim in SHAPES:
        q, grad = (torch.randn(batch, seq, heads, dim).transpose(1, 2) for _ in range(2))
        k, v = (torch.randn(batch, seq, kv_heads, dim).transpose(1, 2) for _ in range(2))
        scale = dim**-0.5
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        flash = lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True, scale=scale)  # noqa: E731
        blocks = lambda: torch.ops.mindspeed.attention_blocked_backward(grad, q, k, v, out, lse, scale)  # noqa: E731
        times = common.interleaved({"flash": flash, "blocks": blocks}, args.rounds)
        a, b = (statistics.median(times[n]) * 1e3 for n in ("flash", "blocks"))
        print(f"{str((batch, heads, kv_heads, seq, dim)):<36}{a:>10.2f}{b:>11.2f}{b / a:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
