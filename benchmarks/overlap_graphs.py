"""Whole passes on whole graphs: Llama layers under tensor and sequence parallelism, traced without memory or devices, scheduled
as they came and in chunks, under the simulator.

    python benchmarks/overlap_graphs.py --layers 2 --devices ascend910b2 ascend910c h100

The program is Megatron's (sequence first, an all_gather before and a reduce_scatter after each pair of products, the
gathered input kept for the backward) on meta tensors and a process group that moves nothing. Everything is modelled.
In brackets: the step over the bound of the whole graph (compute, each link, critical path), which chunks may go under,
for they shorten the critical path; compute alone is the bound of both.
"""

from __future__ import annotations

import argparse
import datetime
import re
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

warnings.filterwarnings("ignore", category=FutureWarning)

DENSE = {"Llama-8B": (4096, 32, 8, 14336), "Llama-70B": (8192, 64, 8, 28672)}


class Layer(nn.Module):
    """This rank's part of a layer; [seq / ranks, batch, hidden]."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, ranks: int):
        super().__init__()
        self.dim = hidden // heads
        self.heads, self.kv_heads = heads // ranks, kv_heads // ranks
        weight = lambda *shape: nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))
        self.qkv, self.out = weight((self.heads + 2 * self.kv_heads) * self.dim, hidden), weight(hidden, self.heads * self.dim)
        self.gate, self.up, self.down = weight(ffn // ranks, hidden), weight(ffn // ranks, hidden), weight(hidden, ffn // ranks)
        self.norm1, self.norm2 = weight(hidden), weight(hidden)

    def forward(self, x, group):
        from mindspeed_fx.megatron.collectives import gather_from_sequence_parallel_region as gather, reduce_scatter_to_sequence_parallel_region as scatter

        y = gather(F.rms_norm(x, x.shape[-1:], self.norm1, 1e-5), True, group)
        q, k, v = F.linear(y, self.qkv).split([self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], -1)
        q, k, v = (t.view(*t.shape[:2], -1, self.dim).permute(1, 2, 0, 3) for t in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3).flatten(2)
        x = x + scatter(F.linear(a, self.out), group)
        y = gather(F.rms_norm(x, x.shape[-1:], self.norm2, 1e-5), True, group)
        return x + scatter(F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down), group)


def report(model: str, layers: int, device: str, seq: int, batch: int, ranks: int, **options) -> str:
    """What the passes say of one forward and backward."""
    import mindspeed_fx

    stack = nn.ModuleList(Layer(*DENSE[model], ranks) for _ in range(layers))
    x = torch.empty(seq // ranks, batch, DENSE[model][0], dtype=torch.bfloat16, device="meta", requires_grad=True)

    def run(x):
        for layer in stack:
            x = layer(x, dist.group.WORLD)
        return x

    torch._dynamo.reset()
    return mindspeed_fx.explain(run, x, options={"target": "npu", "codegen": "eager", "hardware": device, **options})


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(DENSE))
    parser.add_argument("--devices", nargs="*", default=["ascend910b2", "ascend910c", "h100"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--memory", nargs="*", default=["0", "8GiB"], help="allowances over the peak of the graph as it came")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=given.ranks)
    print(f"# {datetime.date.today()} torch {torch.__version__}  modelled, not measured on a device; {given.layers} layers, batch {given.batch}, {given.seq} tokens, {given.ranks} ranks")
    for device in given.devices:
        for model in given.models:
            for memory in given.memory:
                whole = None
                for name, options in (("whole", {"disable": ["overlap.decompose", "overlap.mc2"]}), ("chunks", {"disable": ["overlap.mc2"]}), ("fused", {})):
                    if name == "fused" and not device.startswith("ascend910"):
                        continue
                    begin = time.perf_counter()
                    text = str(report(model, given.layers, device, given.seq, given.batch, given.ranks, overlap_memory="0B" if memory == "0" else memory, **options))
                    took = time.perf_counter() - begin
                    steps = {side: tuple(map(float, found)) for side, *found in re.findall(r"(forward|backward): modelled step (\S+) -> (\S+) ms \(bound (\S+)\)", text)}
                    if name == "fused":
                        fused = re.findall(r"(forward|backward): modelled step \S+ ms whole, \S+ ms at best in chunks, (\S+) ms with (\d+) fused", text)
                        steps = {side: (float(ms),) for side, ms, _ in fused if side in whole}
                        print(f"{device:<12} {model:<10} +{memory:<5} fused   " + "".join(f"{side} {steps[side][0]:8.3f} ms ({steps[side][0] / whole[side][2]:.3f})   " for side in steps))
                        continue
                    whole = whole or {side: (plain, after, bound) for side, (plain, after, bound) in steps.items()}
                    total = sum(after for _, after, _ in steps.values()) / sum(w[2] for w in whole.values())
                    print(
                        f"{device:<12} {model:<10} +{memory:<5} {name:<7} "
                        + "".join(f"{side} {after:8.3f} ms ({after / whole[side][2]:.3f})   " for side, (_, after, _) in steps.items())
                        + f"both {total:.3f} of the whole's bound; {took:.0f} s"
                    )  # fmt: skip
                    if given.verbose:
                        print(text)


if __name__ == "__main__":
    main()
