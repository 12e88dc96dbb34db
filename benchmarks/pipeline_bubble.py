"""The bubble that a backward in parts removes: one stage of a Llama split and timed by the cost model, pipeline
schedules played with these times.

    python -m benchmarks.pipeline_bubble [--hidden 512] [--layers 2] [--batch 4] [--seq 256] [--hardware cpu] [--ranks
    4] [--microbatches 8]

Bubble: share of ranks x time in which nothing runs. "1F1B" runs every backward in one piece; "ahead" makes again,
before a gradient arrives, what the backward needs (MindSpeed's ripipe); "zero bubble" also puts gradients of weights
off (ZB-H1; MindSpeed's nano-pipe). Messages cost nothing. Everything is modelled; that the parts give the same bits is
tests/passes/recompute/test_pipelining.py.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import mindspeed_fx
from benchmarks import common
from mindspeed_fx.cost.graph import estimate
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.pipeline import Parts, one_f_one_b, play, recompute_ahead, zero_bubble


class Stage(nn.Module):
    def __init__(self, hidden: int, layers: int):
        super().__init__()
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_attention_heads=8, num_key_value_heads=8
        )
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(layers))
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])[None]
        embedded = self.rotary(x, places)
        for layer in self.layers:
            out = layer(x, position_embeddings=embedded, position_ids=places)
            x = out[0] if isinstance(out, tuple) else out
        return x


def main() -> None:
    arg = common.arguments(hidden=512, layers=2, batch=4, seq=256, hardware="cpu", ranks=4, microbatches=8)
    common.header(
        f"a stage of {arg.layers} layers of hidden {arg.hidden}, {arg.batch} x {arg.seq} tokens, modelled for "
        f"{arg.hardware}; {arg.ranks} ranks, {arg.microbatches} microbatches"
    )
    print(f"{'recompute':<10} {'F ms':>7} {'R ms':>7} {'I ms':>7} {'W ms':>7} | schedule: step ms, bubble")
    device = hardware(arg.hardware)
    for policy in ("none", "full"):
        torch.manual_seed(0)
        part = mindspeed_fx.split_backward(Stage(arg.hidden, arg.layers), {"recompute": policy})
        part(torch.randn(arg.batch, arg.seq, arg.hidden, requires_grad=True)).sum().backward()
        (graphs,) = part.graphs
        seconds = [
            estimate(gm, device).seconds
            for gm in (graphs.forward, graphs.parts.recompute.gm, graphs.parts.inputs.gm, graphs.parts.weights.gm)
        ]
        parts = Parts(*seconds)
        shape = (arg.ranks, arg.microbatches)
        orders = {
            "1F1B": one_f_one_b(*shape),
            "ahead": recompute_ahead(*shape),
            "zero bubble": zero_bubble(*shape, recompute=bool(graphs.parts.recompute.makes)),
        }
        played = {
            name: play(order, parts)
            for name, order in orders.items()
            if graphs.parts.recompute.makes or name != "ahead"
        }
        print(
            f"{policy:<10} "
            + " ".join(f"{s * 1e3:>7.2f}" for s in seconds)
            + " | "
            + "; ".join(f"{name}: {p.seconds * 1e3:.1f}, {p.bubble * 100:.1f} %" for name, p in played.items())
        )


if __name__ == "__main__":
    main()
