"""Simulated training steps: no overlap, Inductor's own overlap scheduling, and ours, under one simulator and cost
model.

    python -m benchmarks.overlap_simulated

Modelled, on traces of overlap_traces.py; nothing here has run on a device. "/bound" divides by max(compute, each link,
critical path); "/heads" by the higher bound that also knows how early each task can start and what must come after it
(TaskGraph.highest_bound): no order is shorter than either. A collective is hideable when the graph has at least its own
time of independent compute, hidden when at most 1 % of its time is exposed. Peak memory is of activations, gathered
parameters and gradients, not of parameters.
"""

from __future__ import annotations

import argparse
import datetime
import time

from benchmarks import overlap_traces as traces
from mindspeed_fx.passes.overlap.model.reasons import hideable, is_hidden
from mindspeed_fx.passes.overlap.model.simulator import Timeline, simulate
from mindspeed_fx.passes.overlap.scheduler.local_search import schedule

DEVICES = ("ascend910b2", "ascend910c", "h100")


def cases(device: str) -> dict[str, object]:
    dense = lambda model, chunks: lambda: traces.tensor_parallel(model, device, chunks=chunks)
    return {
        "Llama-8B TP8+SP": dense(traces.LLAMA_8B, 1),
        "Llama-8B TP8+SP, 4 chunks": dense(traces.LLAMA_8B, 4),
        "Llama-70B TP8+SP": dense(traces.LLAMA_70B, 1),
        "Llama-70B TP8+SP, 4 chunks": dense(traces.LLAMA_70B, 4),
        "Llama-8B ZeRO-3, 16 ranks": lambda: traces.zero3(traces.LLAMA_8B, device),
        "Llama-70B ZeRO-3, 64 ranks": lambda: traces.zero3(traces.LLAMA_70B, device, ranks=64),
        "DeepSeek-V3-like EP32": lambda: traces.experts(device, batches=1),
        "DeepSeek-V3-like EP32, 2 batches": lambda: traces.experts(device, batches=2),
        "DeepSeek-V3-like EP32, 4 batches": lambda: traces.experts(device, batches=4),
    }


def row(name: str, t: Timeline, candidates: list[int], seconds: float | None = None) -> str:
    graph = t.graph
    kept = sum(is_hidden(t, i) for i in candidates)
    took = f"{seconds:.2f}" if seconds is not None else "-"
    share = f"{kept}/{len(candidates)}" + (f" {100 * kept / len(candidates):.1f}%" if candidates else "")
    return (
        f"  {name:<14}{t.seconds * 1e3:>10.2f}{t.seconds / graph.bound():>9.4f}{t.seconds / graph.highest_bound:>9.4f}"
        f"{t.exposed_seconds * 1e3:>11.2f}{share:>18}{t.peak / 2**30:>9.2f}{took:>8}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs="*", default=DEVICES)
    parser.add_argument("--only", default="", help="part of a case's name")
    parser.add_argument(
        "--inductor",
        type=int,
        default=0,
        help="also Inductor's overlap scheduling, on graphs of up to this many tasks (slow)",
    )
    args = parser.parse_args()
    print(f"# {datetime.date.today()}  modelled, not measured on a device")
    for device in args.devices:
        for name, make in cases(device).items():
            if args.only not in name:
                continue
            graph = make()
            busy = graph.busy()
            candidates = hideable(graph)
            links = ", ".join(f"{k} {v * 1e3:.1f}" for k, v in busy.items())
            print(
                f"\n{device}: {name}: {len(graph)} tasks, {len(graph.transfers)} collectives, {len(candidates)} "
                f"hideable; busy ms: {links}; bound {graph.bound() * 1e3:.2f} ms"
            )
            print(
                f"  {'':<14}{'step ms':>10}{'/bound':>9}{'/heads':>9}"
                f"{'exposed ms':>11}{'hidden':>18}{'peak GiB':>9}{'took s':>8}"
            )
            print(row("no overlap", simulate(graph), candidates))
            if len(graph) <= args.inductor:
                from benchmarks.overlap_inductor import inductor_order

                begin = time.perf_counter()
                order = inductor_order(graph)
                print(row("Inductor", simulate(graph, order), candidates, time.perf_counter() - begin))
            for label, allowance in (("ours", 0), ("ours, any mem", None)):
                begin = time.perf_counter()
                t = schedule(graph, allowance=allowance)
                print(row(label, t, candidates, time.perf_counter() - begin))


if __name__ == "__main__":
    main()
