"""The mixing of residual streams (mHC) as transformers' DeepSeek-V4 spells it: Sinkhorn's algorithm on a small matrix
for each token, forward and backward, beside Inductor on that spelling.

    python -m benchmarks.sinkhorn_knopp [--clock wall] [--rounds 5] [--tokens 2048] [--streams 4] [--iterations 20]
"""

from __future__ import annotations

import torch

from benchmarks import common


def main() -> None:
    args = common.arguments(rounds=5, tokens=2048, streams=4, iterations=20, clock="wall")
    torch.manual_seed(0)
    x = torch.randn(1, args.tokens, args.streams, args.streams, requires_grad=True)
    grad = torch.randn_like(x)

    def mix(x: torch.Tensor) -> torch.Tensor:
        comb = torch.softmax(x, dim=-1) + 1e-6
        comb = comb / (comb.sum(dim=-2, keepdim=True) + 1e-6)
        for _ in range(args.iterations - 1):
            comb = comb / (comb.sum(dim=-1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(dim=-2, keepdim=True) + 1e-6)
        return comb

    steps = {}
    for backend in ("inductor", "mindspeed"):
        torch._dynamo.reset()
        compiled = torch.compile(mix, backend=backend)
        steps[backend] = lambda compiled=compiled: torch.autograd.grad(compiled(x), [x], grad)
        steps[backend]()
    common.header(
        f"Sinkhorn's algorithm, {args.tokens} tokens, {args.streams} streams, {args.iterations} iterations, "
        f"{args.clock} time"
    )
    times = common.interleaved(steps, args.rounds, clock=args.clock)
    common.table(times, {name: common.peak_bytes(step, 0) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
