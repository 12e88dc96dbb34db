"""Weight gradients ``g^T x`` on CPU in float32: torch.mm (MKL), oneDNN's inner product, and our kernel, interleaved.

python -m benchmarks.weight_gradient --rounds 15
"""

from __future__ import annotations

import statistics

import torch

from benchmarks import common
from mindspeed_fx.kernels.cpu.weight_gradient import problem, weight_gradient

SHAPES = [
    (256, 256, 256),
    (1024, 256, 512),
    (1024, 512, 512),
    (1024, 1408, 512),
    (1024, 512, 1408),
    (2048, 2816, 512),
    (1024, 8192, 512),
    (2048, 32768, 512),
]


def main() -> None:
    args = common.arguments(rounds=15)
    common.header("weight gradients, float32")
    print(
        f"{'tokens, out, in':<22}{'mkl ms':>9}{'onednn ms':>11}{'own ms':>9}"
        f"{'own GFLOP/s':>13}{'own/mkl':>9}{'own/onednn':>12}"
    )
    for tokens, out, into in SHAPES:
        g, x = torch.randn(tokens, out), torch.randn(tokens, into)
        assert problem(g, x) is None, problem(g, x)
        rivals = {
            "mkl": lambda: torch.mm(g.t(), x),
            "onednn": lambda: torch.ops.mkldnn._linear_pointwise(g.t(), x.t(), None, "none", [], ""),
            "own": lambda: weight_gradient(g, x),
        }
        mkl, onednn, own = (
            statistics.median(t) * 1e3 for t in common.interleaved(rivals, args.rounds if out < 9000 else 5).values()
        )
        print(
            f"{str((tokens, out, into)):<22}{mkl:>9.2f}{onednn:>11.2f}{own:>9.2f}"
            f"{2 * tokens * out * into / own / 1e6:>13.0f}{own / mkl:>9.3f}{own / onednn:>12.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
