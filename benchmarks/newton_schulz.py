"""Muon's Newton-Schulz iteration on weights of a layer, beside Inductor on the formula and torch.optim's own.

    python -m benchmarks.newton_schulz [--clock wall] [--rounds 5] [--hidden 1024] [--steps 5]

torch.optim.Muon computes in bfloat16; the others in float32, or all in bfloat16 with --narrow 1.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from benchmarks import common


def formula(x: torch.Tensor, steps: int) -> torch.Tensor:
    """The quintic iteration as it is published."""
    from mindspeed_fx.megatron import muon

    x = x / x.norm().clamp_min(muon.SMALLEST)
    for a, b, c in itertools.islice(itertools.cycle(muon.COEFFICIENTS["quintic"]), steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x


def main() -> None:
    from torch.optim._muon import _zeropower_via_newtonschulz

    from mindspeed_fx.megatron import muon

    args: Any = common.arguments(rounds=5, hidden=1024, steps=5, narrow=0, clock="wall")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("medium" if args.narrow else "highest")
    weights = [torch.randn(args.hidden, n * args.hidden) for n in (1, 2)]
    typed = [w.bfloat16() if args.narrow else w for w in weights]
    compiled = torch.compile(formula)
    common.header(f"Newton-Schulz, {args.steps} steps, weights {[list(w.shape) for w in weights]}, {args.clock} time")
    steps = {
        "inductor": lambda: [compiled(w, args.steps) for w in typed],
        "torch.optim": lambda: [
            _zeropower_via_newtonschulz(w, (3.4445, -4.775, 2.0315), args.steps, 1e-7) for w in weights
        ],
        "mindspeed": lambda: [muon.orthogonalize(w, args.steps, "quintic") for w in weights],
    }
    for ours, theirs in zip(steps["mindspeed"](), steps["inductor"]()):
        tolerance = 2e-2 if args.narrow else 1e-4
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=tolerance, atol=tolerance)
    times = common.interleaved(steps, args.rounds, warmup=1, clock=args.clock)
    common.table(times, {name: common.peak_bytes(step, 0) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
