"""The gated delta rule of Hugging Face's Qwen3-Next on CPU, forward and backward, beside Inductor on that spelling.

    python -m benchmarks.gated_delta_rule [--rounds 7] [--seq 2048] [--k_heads 4] [--heads 8] [--dim 128] [--clock wall]

Gradients and the result are not counted as memory of either, since both have them.
"""

from __future__ import annotations

import torch

from benchmarks import common


def rule(q, k, v, g, beta):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    return torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def main() -> None:
    args = common.arguments(rounds=7, seq=2048, k_heads=4, heads=8, dim=128, clock="wall")
    torch.manual_seed(0)
    q, k = (torch.randn(1, args.seq, args.k_heads, args.dim, requires_grad=True) for _ in range(2))
    v = torch.randn(1, args.seq, args.heads, args.dim, requires_grad=True)
    g, beta = (-torch.rand(1, args.seq, args.heads)).requires_grad_(), torch.rand(1, args.seq, args.heads)
    inputs, grad = (q, k, v, g, beta.requires_grad_()), torch.randn_like(v)
    steps = {}
    for backend in ("inductor", "mindspeed"):
        torch._dynamo.reset()
        compiled = torch.compile(rule, backend=backend)
        steps[backend] = lambda compiled=compiled: torch.autograd.grad(compiled(*inputs), inputs, grad)
        steps[backend]()
    common.header(
        f"gated delta rule, {args.seq} tokens, {args.k_heads} heads of keys, {args.heads} of values, width {args.dim}, "
        f"{args.clock} time"
    )
    times = common.interleaved(steps, args.rounds, clock=args.clock)
    returned = sum(x.numel() * x.element_size() for x in (*inputs, v))
    common.table(times, {name: common.peak_bytes(step, returned) for name, step in steps.items()}, "mindspeed")


if __name__ == "__main__":
    main()
