"""First step of a parallelized model in new processes: with empty caches, and with those of a start before.

    python -m benchmarks.plan_start [--layers 4,16] [--rounds 1] [--plans dp:zero2,tp:tp_sp]

A Llama (hidden 256, 128 tokens, float32) over two gloo ranks on one machine, beside the same model on one; forward and
backward, each start in processes of its own. Seconds are of the processor, of both ranks and the compilers that they
start together, from the end of the imports and of the making of the model to the end of the step; hits are those of
AOTAutograd's and Inductor's caches on each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile

from benchmarks import common


def busy() -> float:
    """User seconds of this process and of those that it started and that ended."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def child(layers: int, dim: str, plan: str, rank: int, store: str) -> None:
    """One rank: seconds of its first step, and hits and misses."""
    import torch
    import torch._inductor.compile_fx  # noqa: F401
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh

    import mindspeed_fx
    import mindspeed_fx.backend  # noqa: F401
    from mindspeed_fx.sharding.spmd import program  # noqa: F401
    from tests.sharding.llama import Llama

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(layers, hidden=256, heads=4, kv_heads=4, ffn=704, vocab=1024)
    ids, labels = (torch.randint(0, 1024, (2, 128)) for _ in range(2))
    if plan:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        model = mindspeed_fx.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=(dim,)), plan)
    start = busy()
    torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False)(ids, labels).backward()
    seconds = busy() - start
    if plan:
        torch.distributed.barrier()
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    hits = [
        [c[f"{name}_cache_{word}"] for word in ("hit", "miss")]
        for c, name in ((aot, "autograd"), (inductor, "fxgraph"))
    ]
    print(json.dumps([seconds, *hits]))


def start(layers: int, dim: str, plan: str, cache: str) -> list:
    """Both ranks, or the one: [seconds, AOTAutograd's hits and misses, Inductor's] of each."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.plan_start", "--child", f"{layers}:{dim}:{plan}:{rank}:{folder}/s"],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )
            for rank in range(2 if plan else 1)
        ]
        texts = [p.communicate()[0] for p in processes]
    if any(p.returncode for p in processes):
        raise SystemExit(f"{plan}: a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def main(depths: list[int], rounds: int, plans: list[str]) -> None:
    common.header("first step in new processes, user processor seconds of all ranks, caches empty and full")
    for layers in depths:
        for word in ("", *plans):
            dim, _, plan = word.partition(":")
            cold, warm = [], []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as cache:
                    cold.append(first := start(layers, dim, plan, cache))
                    warm.append(second := start(layers, dim, plan, cache))
            a, b = (statistics.median(sum(r[0] for r in ranks) for ranks in turn) for turn in (cold, warm))
            shown = [" and ".join(f"AOT {r[1]} FX {r[2]}" for r in ranks) for ranks in (first, second)]
            print(
                f"{layers:>3} layers, {plan or 'one device':<10} cold {a:6.1f} s, warm {b:6.1f} s ({b / a:.2f}); "
                f"[hits, misses] cold {shown[0]}; warm {shown[1]}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", default="")
    parser.add_argument("--layers", default="4,16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plans", default="dp:zero2,tp:tp_sp")
    given = parser.parse_args()
    if given.child:
        n, dim, plan, rank, store = given.child.split(":")
        child(int(n), dim, plan, int(rank), store)
    else:
        main([int(n) for n in given.layers.split(",")], given.rounds, given.plans.split(","))
