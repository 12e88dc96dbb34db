"""Mamba's selective scan as Hugging Face's Mamba and Jamba spell it on CPU, forward and backward, beside Inductor on
that spelling: an associative scan (what these models compile to), or token by token (--unrolled 1; keep --seq small,
for Inductor's code grows with it).

    python -m benchmarks.selective_scan [--clock wall] [--rounds 3] [--seq 2048] [--channels 1536] [--state 16]
        [--unrolled 0]

Gradients and the result are not counted as memory of either, since both have them.
"""

from __future__ import annotations

import torch

from benchmarks import common


def main() -> None:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    args = common.arguments(rounds=3, seq=2048, channels=1536, state=16, unrolled=0, clock="wall")
    torch.manual_seed(0)
    u, dt, z = (torch.randn(1, args.channels, args.seq) for _ in range(3))
    b, c = (torch.randn(1, args.state, args.seq) for _ in range(2))
    a = -torch.arange(1, args.state + 1).float().repeat(args.channels, 1)
    inputs = [t.requires_grad_() for t in (u, dt, a, b, c, torch.ones(args.channels), z, torch.ones(args.channels))]
    grad = torch.randn_like(u)

    def scan(u, dt, a, b, c, d, z, bias):
        whole = not args.unrolled
        return mamba_selective_scan(u, dt, a, b, c, d, z, bias, delta_softplus=True, use_associative_scan=whole)

    steps = {}
    for backend in ("inductor", "mindspeed"):
        torch._dynamo.reset()
        compiled = torch.compile(scan, backend=backend)
        steps[backend] = lambda compiled=compiled: torch.autograd.grad(compiled(*inputs), inputs, grad)
        steps[backend]()
    common.header(
        f"selective scan, {args.seq} tokens, {args.channels} channels, states {args.state} wide, "
        f"{'token by token' if args.unrolled else 'associative scan'}, {args.clock} time"
    )
    times = common.interleaved(steps, args.rounds, warmup=0, clock=args.clock)
    returned = sum(x.numel() * x.element_size() for x in (*inputs, grad))
    common.table(times, {name: common.peak_bytes(step, returned) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
