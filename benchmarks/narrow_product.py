"""Products of bfloat16 and float16 on CPU, forward and both gradients of a linear layer: ATen's, ours, and oneDNN's in
float32, interleaved.

    python -m benchmarks.narrow_product [--rounds 3]
"""

from __future__ import annotations

import statistics

import torch

from benchmarks import common
from mindspeed_fx.kernels.cpu.narrow_product import multiply

SHAPES = [(64, 64, 64), (1024, 512, 512), (1024, 512, 1408), (1024, 1408, 512), (256, 512, 8192)]
"""(rows, inputs, outputs)."""


def main() -> None:
    args = common.arguments(rounds=3)
    common.header(f"products of a linear layer; medians of {args.rounds} interleaved")
    print(
        f"{'rows, in, out':<18}{'product':<8}{'type':<10}{'aten ms':>10}{'own ms':>9}{'float32 ms':>12}{'own/aten':>10}"
    )
    for rows, inputs, outputs in SHAPES:
        x, w, g = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
        for name, a, b in (("x w^T", x, w.t()), ("g w", g, w), ("g^T x", g.t(), x)):
            for dtype in (torch.bfloat16, torch.float16):
                c, d = a.to(dtype), b.to(dtype)
                alternatives = {
                    "aten": lambda c=c, d=d: torch.mm(c, d),
                    "own": lambda c=c, d=d: multiply(c, d),
                    "float32": lambda a=a, b=b: torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], ""),
                }
                times = common.interleaved(alternatives, args.rounds, 1)
                aten, own, wide = (statistics.median(t) * 1e3 for t in times.values())
                print(
                    f"{str((rows, inputs, outputs)):<18}{name:<8}{str(dtype)[6:]:<10}{aten:>10.2f}{own:>9.2f}"
                    f"{wide:>12.2f}{own / aten:>10.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
