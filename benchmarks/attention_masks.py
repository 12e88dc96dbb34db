"""Attention in float32 with a mask on CPU, forward and backward: ATen's flash kernel and ours in C++, interleaved.

    python -m benchmarks.attention_masks [--rounds 5] [--heads 8] [--clock wall]

Masks: boolean, each query's own and earlier keys; of those about one in seven, as an indexer chooses; half of all keys;
and numbers that are added to the scores. ATen's kernel takes boolean masks as numbers.
"""

from __future__ import annotations

import statistics

import torch

from benchmarks import common
from mindspeed_fx.kernels.cpu import attention

ops = torch.ops.mindspeed
SIZES = [(seq, *dims) for seq in (128, 512, 2048) for dims in ((64, 64), (128, 128), (192, 128))]


def masks(seq: int, heads: int) -> dict[str, torch.Tensor]:
    """Name -> mask [1, 1 or heads, seq, seq]."""
    causal = torch.ones(1, 1, seq, seq, dtype=torch.bool).tril()
    own = torch.eye(seq, dtype=torch.bool)
    return {
        "causal": causal,
        "chosen": causal & (torch.rand(1, 1, seq, seq) < 0.15) | own,
        "half": torch.rand(1, 1, seq, seq) < 0.5,
        "numbers": torch.randn(1, heads, seq, seq),
    }


def main() -> None:
    args = common.arguments(rounds=5, heads=8, clock="wall")
    torch.manual_seed(0)
    common.header(f"attention with a mask, float32, {args.heads} heads, {args.clock} time; the ratio is that of ours")
    print(f"{'':<9}{'mask':<9}{'seq, dim, dim of v':<20}{'aten ms':>10}{'own ms':>10}{'own/aten':>10}")
    for seq, dim, v_dim in SIZES:
        q, k = torch.randn(2, 1, seq, args.heads, dim).transpose(2, 3)
        v, grad = torch.randn(2, 1, seq, args.heads, v_dim).transpose(2, 3)
        for name, mask in masks(seq, args.heads).items():
            options = (False, dim**-0.5)
            out, lse = attention._flash(q, k, v, mask, *options)
            rest = (*options, 0, 0.0)
            forward = {
                "aten": lambda: attention._flash(q, k, v, mask, *options),
                "own": lambda: ops.attention_flash(q, k, v, *rest, None, mask),
            }
            backward = {
                "aten": lambda: attention._flash_backward(grad, q, k, v, out, lse, mask, *options),
                "own": lambda: ops.attention_flash_backward(grad, q, k, v, out, lse, *rest, mask),
            }
            for side, rivals in (("forward", forward), ("backward", backward)):
                times = common.interleaved(rivals, args.rounds, warmup=1, clock=args.clock)
                aten, own = (statistics.median(seconds) * 1e3 for seconds in times.values())
                sizes = str((seq, dim, v_dim))
                print(f"{side:<9}{name:<9}{sizes:<20}{aten:>10.2f}{own:>10.2f}{own / aten:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
