"""Whole passes on whole graphs: Llama layers under tensor and sequence parallelism, traced without memory or devices,
scheduled as they came and in chunks, under the simulator.

    python -m benchmarks.overlap_graphs --layers 2 --devices ascend910b2 ascend910c h100

The program is Megatron's (sequence first, an all_gather before and a reduce_scatter after each pair of products, the
gathered input kept for the backward) on meta tensors and a process group that moves nothing. Everything is modelled.
In brackets: the step over the bound of the whole graph (compute, each link, critical path), which chunks may go under,
for they shorten the critical path; then over the bound of the graph that was scheduled, with the work that chunks add.
"of what could be hidden": see docs/overlap.md, in seconds; "of collectives": of the collectives of the scheduled graph
that have at least their own time of independent compute, those of which at most 1 % is exposed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import time
import warnings
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mindspeed_fx.passes.overlap.model.reasons import hideable, is_hidden
from mindspeed_fx.passes.overlap.model.simulator import Timeline

warnings.filterwarnings("ignore", category=FutureWarning)

DENSE = {"Llama-8B": (4096, 32, 8, 14336), "Llama-70B": (8192, 64, 8, 28672)}


class Layer(nn.Module):
    """This rank's part of a layer; [seq / ranks, batch, hidden]."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int, ranks: int):
        super().__init__()
        self.dim = hidden // heads
        self.asap_lengths, self.kv_heads = heads // ranks, kv_heads // ranks
        weight = lambda *shape: nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))
        self.qkv, self.out = (
            weight((self.asap_lengths + 2 * self.kv_heads) * self.dim, hidden),
            weight(hidden, self.asap_lengths * self.dim),
        )
        self.gate, self.up, self.down = (
            weight(ffn // ranks, hidden),
            weight(ffn // ranks, hidden),
            weight(hidden, ffn // ranks),
        )
        self.norm1, self.norm2 = weight(hidden), weight(hidden)

    def forward(self, x, group):
        from mindspeed_fx.megatron.collectives import gather_from_sequence_parallel_region as gather
        from mindspeed_fx.megatron.collectives import reduce_scatter_to_sequence_parallel_region as scatter

        y = gather(F.rms_norm(x, x.shape[-1:], self.norm1, 1e-5), True, group)
        q, k, v = F.linear(y, self.qkv).split(
            [self.asap_lengths * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim], -1
        )
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


def scheduled(*args: object, **options: object) -> tuple[dict[str, Timeline], str]:
    """The schedules of forward and backward, and what the passes say."""
    from mindspeed_fx.passes.overlap import schedule

    results = []

    def tell(report, work, before, after):
        results.append(after)
        return original(report, work, before, after)

    original = schedule._tell
    with mock.patch.object(schedule, "_tell", tell):
        text = str(report(*args, **options))
    return dict(zip(("forward", "backward"), results)), text


def main() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(DENSE))
    parser.add_argument("--devices", nargs="*", default=["ascend910b2", "ascend910c", "h100"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--memory", nargs="*", default=["0", "8GiB"], help="allowances over the peak of the graph as it came"
    )
    parser.add_argument("--variants", nargs="*", default=["whole", "chunks", "fused"])
    parser.add_argument(
        "--prove",
        type=float,
        default=0.0,
        help="seconds for CP-SAT to raise the bound of each stretch between two attentions "
        "(overlap_optimum.proven_bound)",
    )
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    from benchmarks.overlap_optimum import proven_bound

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    print(
        f"# {datetime.date.today()} torch {torch.__version__}  modelled, not measured on a device; {args.layers} "
        f"layers, batch {args.batch}, {args.seq} tokens, {args.ranks} ranks"
    )
    for device in args.devices:
        for model in args.models:
            for memory in args.memory:
                whole = None
                for name, options in (
                    ("whole", {"disable": ["overlap.decompose", "overlap.mc2"]}),
                    ("chunks", {"disable": ["overlap.mc2"]}),
                    ("fused", {}),
                ):
                    if name not in args.variants or name == "fused" and not device.startswith("ascend910"):
                        continue
                    begin = time.perf_counter()
                    result, text = scheduled(
                        model,
                        args.layers,
                        device,
                        args.seq,
                        args.batch,
                        args.ranks,
                        overlap_memory="0B" if memory == "0" else memory,
                        **options,
                    )
                    took = time.perf_counter() - begin
                    label = f"{device:<12} {model:<10} +{memory:<5} {name:<7} "
                    if name == "fused":
                        fused = re.findall(
                            r"(forward|backward): modelled step \S+ ms whole, \S+ ms at best in chunks, (\S+) ms with "
                            r"(\d+) fused",
                            text,
                        )
                        print(
                            label
                            + "".join(
                                f"{side} {float(ms):8.3f} ms ({float(ms) / whole[side] / 1e3:.3f})   "
                                for side, ms, _ in fused
                            ),
                            flush=True,
                        )
                        continue
                    whole = whole or {side: t.graph.bound() for side, t in result.items()}
                    step, old, own = (
                        sum(f(side, t) for side, t in result.items())
                        for f in (
                            lambda side, t: t.seconds,
                            lambda side, t: whole[side],
                            lambda side, t: t.graph.bound(),
                        )
                    )
                    highest = lambda g: proven_bound(g, args.prove) if args.prove else g.highest_bound  # noqa: E731
                    serial, least = (
                        sum(f(t.graph) for t in result.values()) for f in (lambda g: sum(g.busy().values()), highest)
                    )
                    could = sum(len(hideable(t.graph)) for t in result.values())
                    did = sum(is_hidden(t, i) for t in result.values() for i in hideable(t.graph))
                    print(
                        label
                        + "".join(
                            f"{side} {t.seconds * 1e3:8.3f} ms ({t.seconds / whole[side]:.3f}, "
                            f"{t.seconds / t.graph.bound():.3f})   "
                            for side, t in result.items()
                        )
                        + f"both {step / old:.3f} of the whole's bound, {step / own:.3f} of its own; "
                        f"{step / least:.3f} of {'what is proven' if args.prove else 'its highest'}; "
                        f"{(serial - step) / (serial - least):.1%} of what could be hidden is; of collectives "
                        f"{did}/{could}{f' {100 * did / could:.0f}%' if could else ''}; {took:.0f} s",
                        flush=True,
                    )
                    if args.verbose:
                        print(text)


if __name__ == "__main__":
    main()
