"""One layer of experts as Hugging Face's Mixtral has it, one training step on CPU: eager, Inductor, mindspeed,
interleaved.

    python -m benchmarks.moe_cpu [--rounds 11] [--hidden 512] [--ffn 1024] [--experts 8] [--topk 2] [--tokens 1024]

"grouped_mm" and "batched_mm" are Hugging Face's settings of experts_implementation. Eight batches take turns, so that
the numbers of tokens per expert change from step to step as they do in training.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from benchmarks import common


class Layer(nn.Module):
    """Router and experts; the hidden states are parameters so that they get a gradient."""

    def __init__(self, args, implementation: str, dtype: torch.dtype, batches: int):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        super().__init__()
        config = MixtralConfig(
            hidden_size=args.hidden,
            intermediate_size=args.ffn,
            num_local_experts=args.experts,
            num_experts_per_tok=args.topk,
        )
        config._experts_implementation = implementation
        self.block = MixtralSparseMoeBlock(config)
        for p in self.block.parameters():
            nn.init.normal_(p, std=0.02)
        self.hidden = nn.Parameter(torch.randn(batches, 1, args.tokens, args.hidden))
        self.to(dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self.block(hidden)
        return (out[0] if isinstance(out, tuple) else out).float().pow(2).mean()


def main() -> None:
    args = common.arguments(
        rounds=11,
        hidden=512,
        ffn=1024,
        experts=8,
        topk=2,
        tokens=1024,
        implementations="grouped_mm",
        dtypes="float32",
        without="",
    )
    for implementation, dtype in itertools.product(args.implementations.split(","), args.dtypes.split(",")):
        torch.manual_seed(0)
        model = Layer(args, implementation, getattr(torch, dtype), batches=8)
        steps, which = {}, {}
        rivals = {"eager": None, "inductor": {"backend": "inductor"}, "mindspeed": {"backend": "mindspeed"}}
        for name in filter(None, args.without.split(",")):
            rivals[f"- {name}"] = {"backend": "mindspeed", "options": {"disable": [f"fusion.{name}"]}}
        for name, how in rivals.items():
            torch._dynamo.reset()
            compiled = model if how is None else torch.compile(model, fullgraph=True, **how)
            which[name] = itertools.count()
            steps[name] = step(model, compiled, which[name])
            steps[name]()
        common.header(
            f"experts ({implementation}): hidden {args.hidden}, ffn {args.ffn}, {args.experts} experts, "
            f"top-{args.topk}, {args.tokens} tokens, {dtype}"
        )
        times = common.interleaved(steps, args.rounds)
        peaks = {name: common.peak_bytes(run, common.gradient_bytes(model.block)) for name, run in steps.items()}
        common.table(times, peaks, "mindspeed")


def step(model: Layer, compiled, count) -> common.Step:
    """Forward, loss, backward on the next batch; gradients freed before."""

    def run() -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        hidden = model.hidden[next(count) % model.hidden.shape[0]].detach().requires_grad_()
        loss = compiled(hidden)
        loss.backward()
        return loss.detach()

    return run


if __name__ == "__main__":
    main()
