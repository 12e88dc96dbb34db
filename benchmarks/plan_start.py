"""First step of a parallelized model in new processes: with empty caches, with those of a start before, and from files
of ``save_compiled``; and that of the stages of a pipeline.

    python -m benchmarks.plan_start [--layers 4,16] [--rounds 1] [--plans dp:zero2,tp:tp_sp]
                                    [--stages Schedule1F1B,ScheduleInterleavedZeroBubble] [--codegen inductor,eager]

A Llama (hidden 256, 128 tokens, float32) over two gloo ranks on one machine, beside the same model on one; forward and
backward, each start in processes of its own. Seconds are of the processor, of both ranks and the compilers that they
start together, from the end of the imports and of the making of the model to the end of the step; hits are those of
AOTAutograd's and Inductor's caches on each rank. A start from files has empty caches of its own.
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
from typing import Any

from benchmarks import common


def busy() -> float:
    """User seconds of this process and of those that it started and that ended."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def step(model: Any, ids: Any, labels: Any) -> Any:
    return model(ids, labels)


def first_step(model: Any, ids: Any, labels: Any, how: str, file: str) -> None:
    """Compiled, or loaded from ``file``, where a start with "save" wrote it."""
    import torch

    import mindspeed_fx

    if how == "load":
        loaded = mindspeed_fx.load_compiled(step, file, dynamic=False)
        loaded(model, ids, labels).backward()
        if why := loaded.reason or loaded.misses:
            raise SystemExit(f"the file was not used: {why}")
        return
    if how == "save":
        mindspeed_fx.save_compiled(step, file, (model, ids, labels), dynamic=False)
        return
    torch.compile(step, backend="mindspeed", fullgraph=True, dynamic=False)(model, ids, labels).backward()


def step_of_stages(model: Any, mesh: Any, schedule: str, ids: Any, labels: Any, codegen: str) -> None:
    from torch.distributed.pipelining import schedules

    import mindspeed_fx

    kind = getattr(schedules, schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    style = "v" if schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else "loop"
    how = {"virtual": 1} if single else {"virtual": 2, "style": style}
    stages = mindspeed_fx.pipeline_stages(
        model, mesh, None, (ids, labels), microbatches=4, options={"codegen": codegen}, **how
    )
    running = kind(stages[0] if single else stages, 4, loss_fn=lambda loss, _: loss.sum())
    running.step(ids=ids, labels=labels, target=labels)


def child(layers: int, dim: str, plan: str, how: str, rank: int, store: str, file: str) -> None:
    """One rank: seconds of its first step, and hits and misses."""
    import torch
    import torch._inductor.compile_fx  # noqa: F401
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh

    import mindspeed_fx
    import mindspeed_fx.backend  # noqa: F401
    import mindspeed_fx.planning.saved_step  # noqa: F401
    from mindspeed_fx.sharding.spmd import program  # noqa: F401
    from tests.sharding.llama import Llama

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(layers, hidden=256, heads=4, kv_heads=4, ffn=704, vocab=1024)
    ids, labels = (torch.randint(0, 1024, (4 if dim == "pp" else 2, 128)) for _ in range(2))
    if dim:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dim,))
        if dim != "pp":
            model = mindspeed_fx.parallelize(model, mesh, plan)
    start = busy()
    if dim == "pp":
        step_of_stages(model, mesh, plan, ids, labels, how)
    else:
        first_step(model, ids, labels, how, file)
    seconds = busy() - start
    if dim:
        torch.distributed.barrier()
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    hits = [
        [c[f"{name}_cache_{word}"] for word in ("hit", "miss")]
        for c, name in ((aot, "autograd"), (inductor, "fxgraph"))
    ]
    print(json.dumps([seconds, *hits]))


def start(layers: int, dim: str, plan: str, how: str, cache: str, file: str = "") -> list:
    """Both ranks, or the one: [seconds, AOTAutograd's hits and misses, Inductor's] of each."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"{layers}:{dim}:{plan}:{how}:{rank}:{folder}/s:{file}" for rank in range(2 if dim else 1)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.plan_start", "--child", word],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )
            for word in words
        ]
        texts = [p.communicate()[0] for p in processes]
    if any(p.returncode for p in processes):
        raise SystemExit(f"{plan}: a rank failed")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def show(name: str, turns: dict[str, list[list]]) -> None:
    """One line: seconds of all ranks by kind of start, and what the caches of the last one counted."""
    seconds = {kind: statistics.median(sum(r[0] for r in ranks) for ranks in runs) for kind, runs in turns.items()}
    first = seconds["cold"]
    times = ", ".join(f"{kind} {s:.1f} s ({s / first:.2f})" for kind, s in seconds.items())
    shown = "; ".join(
        f"{kind} " + " and ".join(f"AOT {r[1]} FX {r[2]}" for r in runs[-1]) for kind, runs in turns.items()
    )
    print(f"{name}: {times}; [hits, misses] {shown}", flush=True)


def main(depths: list[int], rounds: int, plans: list[str], schedules: list[str], codegens: list[str]) -> None:
    common.header("first step in new processes, user processor seconds of all ranks, by what they find")
    for layers in depths:
        for word in ("", *plans) if plans else ():
            dim, _, plan = word.partition(":")
            turns: dict[str, list[list]] = {"cold": [], "warm": [], "loaded": []}
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as empty:
                    turns["cold"].append(start(layers, dim, plan, "compile", cache))
                    turns["warm"].append(start(layers, dim, plan, "compile", cache))
                    start(layers, dim, plan, "save", cache, f"{empty}/step.mfx")
                    turns["loaded"].append(start(layers, dim, plan, "load", empty, f"{empty}/step.mfx"))
            show(f"{layers:>3} layers, {plan or 'one device'}", turns)
        depth = max(layers, 4)  # one for each of four stages
        for schedule, codegen in ((s, c) for s in schedules for c in codegens):
            turns = {"cold": [], "warm": []}
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as cache:
                    turns["cold"].append(start(depth, "pp", schedule, codegen, cache))
                    turns["warm"].append(start(depth, "pp", schedule, codegen, cache))
            show(f"{depth:>3} layers, {schedule}, {codegen}", turns)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", default="")
    parser.add_argument("--layers", default="4,16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plans", default="dp:zero2,tp:tp_sp")
    parser.add_argument("--stages", default="Schedule1F1B,ScheduleInterleavedZeroBubble")
    parser.add_argument("--codegen", default="inductor,eager")
    given = parser.parse_args()
    if given.child:
        n, dim, plan, how, rank, store, file = given.child.split(":")
        child(int(n), dim, plan, how, int(rank), store, file)
    else:
        depths = [int(n) for n in words(given.layers)]
        main(depths, given.rounds, words(given.plans), words(given.stages), words(given.codegen))
