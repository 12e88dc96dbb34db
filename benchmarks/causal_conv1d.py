"""Causal depthwise convolution with SiLU as Hugging Face's Mamba-2 and Qwen3-Next have it on CPU, forward and backward,
beside Inductor on that spelling.

    python -m benchmarks.causal_conv1d [--clock wall] [--rounds 5] [--seq 2048] [--channels 1792] [--size 4]
        [--dtype float32]

The sequence is a transposed part of a projection, as in the models. Gradients and the result are not counted as memory
of either, since both have them.
"""

from __future__ import annotations

import torch

from benchmarks import common


def main() -> None:
    from transformers.models.mamba2.modeling_mamba2 import causal_conv1d_fn

    args = common.arguments(rounds=5, seq=2048, channels=1792, size=4, dtype="float32", clock="wall")
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    x = torch.randn(1, args.seq, args.channels, dtype=dtype)
    weight, bias = torch.randn(args.channels, args.size, dtype=dtype), torch.randn(args.channels, dtype=dtype)
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    grad = torch.randn_like(x)

    def convolution(x, weight, bias):
        return causal_conv1d_fn(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)

    steps, values = {}, []
    for backend in ("inductor", "mindspeed"):
        torch._dynamo.reset()
        # Fused on request alone: see the pass.
        options = {"options": {"enable": ["fusion.causal_conv1d"]}} if backend == "mindspeed" else {}
        compiled = torch.compile(convolution, backend=backend, **options)
        steps[backend] = lambda compiled=compiled: torch.autograd.grad(compiled(*inputs), inputs, grad)
        values.append([compiled(*inputs), *steps[backend]()])
    worst = max((a - b).abs().max() / a.abs().max() for a, b in zip(*values))
    common.header(
        f"causal convolution, {args.seq} tokens, {args.channels} channels, {args.size} weights, {args.dtype}, "
        f"{args.clock} time; values and gradients differ by at most {worst:.1e} of the largest"
    )
    times = common.interleaved(steps, args.rounds, clock=args.clock)
    returned = sum(t.numel() * t.element_size() for t in (*inputs, grad))
    common.table(times, {name: common.peak_bytes(step, returned) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
