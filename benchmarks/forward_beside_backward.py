"""The forward of one micro-batch beside the backward of another over two gloo processes and a slow link.

    python -m benchmarks.forward_beside_backward --rounds 7

Layers of Megatron's with experts on both ranks, one graph each way. A step is what a pipeline repeats: the forward of a
micro-batch and the backward of the one before, one after the other, or by turns (``--moe-fb-overlap``); the same graphs
and the same bits. The link is that of benchmarks/pipe_experts.py: an injected delay, not a network; without it the
exchanges of a step take no time but their own, with it ``--share`` of the step's compute.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import common
from benchmarks.pipe_experts import Wire, print_exposed, start_rank


class Chunk(torch.nn.Module):
    """Layers one after the other."""

    def __init__(self, layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, hidden):
        for layer in self.layers:
            hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=None)
        return hidden


def build(args: argparse.Namespace) -> Chunk:
    from tests.megatron.gpt_models import tiny_gpt

    model = tiny_gpt(
        layers=args.layers,
        hidden=args.hidden,
        heads=8,
        kv_heads=8,
        ffn=args.ffn,
        experts=args.experts,
        seq=args.tokens,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.0,
        expert_model_parallel_size=2,
    )
    chunk = Chunk(model.decoder.layers)
    for n, parameter in enumerate(chunk.parameters()):
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(n))
    return chunk


def gather_at_once(link: Wire) -> None:
    """Counts of tokens are gathered at once, beside the link: its wait is of exchanges alone."""

    def gather(x, size, group):
        out = x.new_empty(size * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out

    link.library.impl("all_gather_into_tensor", gather, "CPU", allow_override=True)


def make_step(chunk: Chunk, hidden: torch.Tensor, by_turns: bool):
    """A forward of ``hidden``, and the backward of the step before's."""
    from mindspeed_fx.training import turns

    pending: list[torch.Tensor] = []

    def forward():
        return chunk(hidden.clone().requires_grad_())

    def backward():
        pending.pop().pow(2).mean().backward()

    def step():
        dist.barrier()
        chunk.zero_grad()
        if not pending:
            pending.append(forward())
        out = turns.run(forward, backward, second_begins=True)[0] if by_turns else (forward(), backward())[0]
        pending.append(out)
        return [out.detach(), *(p.grad for p in chunk.parameters())]

    return step


def worker(rank: int, store: str, args: argparse.Namespace) -> None:
    from mindspeed_fx.training import turns

    link, hidden = start_rank(rank, store, args)
    gather_at_once(link)
    chunk = build(args)
    turns.mark(chunk.parameters())
    chunk.compile(backend="mindspeed", options={"codegen": "eager"}, fullgraph=True)
    steps = {"one after the other": make_step(chunk, hidden, False), "by turns": make_step(chunk, hidden, True)}
    apart, together = ([x.clone() for x in step()] for step in steps.values())
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
    print_exposed(link, steps, "one after the other", args)


if __name__ == "__main__":
    arguments = common.arguments(rounds=7, hidden=512, ffn=1024, experts=4, tokens=1024, layers=2, share=0.5)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(f"{folder}/store", arguments), nprocs=2)
