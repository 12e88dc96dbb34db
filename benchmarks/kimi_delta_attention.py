"""Kimi Delta Attention of Hugging Face's Kimi Linear on CPU, forward and backward, beside Inductor on that spelling.

    python -m benchmarks.kimi_delta_attention [--rounds 7] [--seq 1024] [--heads 4] [--dim 128] [--clock wall]

That spelling has decays of every pair of tokens in a chunk and every channel, gigabytes of them, and Inductor takes
minutes to compile it. Gradients and the result are not counted as memory of either, since both have them.
"""

from __future__ import annotations

import torch

from benchmarks import common


def attention(q, k, v, g, beta):
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    return chunk_kimi_delta_attention(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def arguments(seq: int, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(1, seq, heads, dim) for _ in range(3))
    g, beta = -torch.rand(1, seq, heads, dim), torch.rand(1, seq, heads)
    return tuple(x.requires_grad_() for x in (q, k, v, g, beta))


def main() -> None:
    args = common.arguments(rounds=7, seq=1024, heads=4, dim=128, clock="wall")
    torch.manual_seed(0)
    inputs = arguments(args.seq, args.heads, args.dim)
    v = inputs[2]
    grad = torch.randn_like(v)
    steps = {}
    for backend in ("inductor", "mindspeed"):
        torch._dynamo.reset()
        compiled = torch.compile(attention, backend=backend)
        steps[backend] = lambda compiled=compiled: torch.autograd.grad(compiled(*inputs), inputs, grad)
        steps[backend]()
    common.header(
        f"Kimi Delta Attention, {args.seq} tokens, {args.heads} heads, width {args.dim}, {args.clock} time",
    )
    times = common.interleaved(steps, args.rounds, clock=args.clock)
    returned = sum(x.numel() * x.element_size() for x in (*inputs, v))
    common.table(times, {name: common.peak_bytes(step, returned) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
