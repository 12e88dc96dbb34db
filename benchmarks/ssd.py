"""Mamba-2's state space dual of Hugging Face's Mamba-2, Bamba, Falcon-H1 and others on CPU, forward and backward,
beside Inductor on that spelling.

    python -m benchmarks.ssd [--clock wall] [--rounds 5] [--seq 2048] [--heads 24] [--groups 1] [--dim 64]
        [--state 128] [--chunk 256]

Gradients and the result are not counted as memory of either, since both have them.
"""

from __future__ import annotations

import torch

from benchmarks import common


def main() -> None:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    args = common.arguments(rounds=5, seq=2048, heads=24, groups=1, dim=64, state=128, chunk=256, clock="wall")
    torch.manual_seed(0)
    x, dt = torch.randn(1, args.seq, args.heads, args.dim), torch.rand(1, args.seq, args.heads)
    b, c = (torch.randn(1, args.seq, args.groups, args.state) for _ in range(2))
    heads = torch.arange(1, args.heads + 1).float()
    inputs = [t.requires_grad_() for t in (x, dt, -heads, b, c, torch.ones_like(heads))]
    grad = torch.randn_like(x)

    def rule(x, dt, a, b, c, d):
        return mamba2_chunk_scan(x, dt, a, b, c, chunk_size=args.chunk, D=d)

    steps = {}
    for backend in ("inductor", "mindspeed"):
        torch._dynamo.reset()
        compiled = torch.compile(rule, backend=backend)
        steps[backend] = lambda compiled=compiled: torch.autograd.grad(compiled(*inputs), inputs, grad)
        steps[backend]()
    common.header(
        f"state space dual, {args.seq} tokens, {args.heads} heads of width {args.dim}, {args.groups} groups, states "
        f"{args.state} wide, the model's chunks {args.chunk}, {args.clock} time"
    )
    times = common.interleaved(steps, args.rounds, warmup=1, clock=args.clock)
    returned = sum(x.numel() * x.element_size() for x in (*inputs, grad))
    common.table(times, {name: common.peak_bytes(step, returned) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
