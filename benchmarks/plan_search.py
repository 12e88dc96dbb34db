"""The plan search: how long it takes, and whether any expert's plan is faster under the same model.

    python -m benchmarks.plan_search [--cells | --speed | --large] [--whole]

Times of the search are wall and processor seconds on this machine, tracing included, imports not. Everything about the
plans is modelled. An expert's plan is what its named plan says about tp, with its own mesh, at the best degree it has
and with the best recompute, microbatches and ZeRO
stage for it: Megatron is TP+SP inside a machine with dp (and pp, if it needs it), FSDP is zero3 over all devices,
Ulysses is cp by heads with zero3, EP+TP is Megatron with experts divided. "-" means that it fits in no way.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from typing import Any, Callable

import scipy
import torch

from benchmarks import plan_models
from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.planning.search import plan
from mindspeed_fx.planning.search.branch_and_bound import branch_and_bound, memory_of
from mindspeed_fx.planning.search.constraints import following
from mindspeed_fx.planning.search.layouts import divisors
from mindspeed_fx.planning.search.model_graph import trace_model
from mindspeed_fx.planning.search.problem import Problem
from mindspeed_fx.sharding.plan import ShardingError
from mindspeed_fx.sharding.presets import named_plan

CELLS = [
    ("llama_8b", {"layers": 32, "batch": 8, "length": 4096}, 8, ("ascend910b2", "ascend910c", "h100")),
    ("llama_8b", {"layers": 32, "batch": 64, "length": 8192}, 64, ("ascend910b2", "ascend910c", "h100")),
    ("llama_8b", {"layers": 32, "batch": 8, "length": 32768}, 64, ("ascend910b2", "ascend910c")),
    ("llama_70b", {"layers": 80, "batch": 64, "length": 4096}, 64, ("ascend910b2", "ascend910c", "h100")),
    ("llama_70b", {"layers": 80, "batch": 128, "length": 8192}, 128, ("ascend910b2", "h100")),
    ("experts", {}, 64, ("ascend910b2", "ascend910c")),
]


def timed(f: Callable[[], Any]) -> tuple[Any, float, float]:
    wall, busy = time.perf_counter(), time.process_time()
    result = f()
    return result, time.perf_counter() - wall, time.process_time() - busy


def experts(problem: Problem, model: Any, device: Any, devices: int, memory: float) -> dict[str, float | None]:
    """Seconds of each expert's best."""
    tp_sp = following(named_plan("tp_sp", model), problem)
    near = [n for n in divisors(devices) if n <= device.node]

    def best(fixed: list[dict], **settings: Any) -> float | None:
        times = []
        for f in fixed:
            try:
                times.append(
                    branch_and_bound(problem, device, devices, memory, keep=1, fixed=f, **settings).solutions[0].seconds
                )
            except ShardingError:
                continue
        return min(times, default=None)

    flat = {"pp": 1, "cp": 1, "ep": 1, "tp": 1}
    results = {
        "Megatron TP+SP": best(
            [{"cp": 1, "ep": 1, "tp": t, "pp": p} for t in near[1:] for p in (1, 2, 4, 8) if devices % (t * p) == 0],
            allowed=tp_sp,
            zero=("never", "zero2"),
        ),
        "FSDP": best([{**flat, "dp": devices}], zero=("never", "zero2", "zero3")),
        "Ulysses": best(
            [{**flat, "cp": c, "dp": devices // c} for c in divisors(devices)[1:]], strategies=("ulysses",)
        ),
    }
    if problem.experts:
        results["EP+TP"] = best(
            [
                {"cp": 1, "pp": 1, "ep": e, "tp": t, "dp": devices // t // e}
                for t in near[:4]
                for e in divisors(devices // t)
                if e > 1
            ],
            allowed=tp_sp,
        )
    return results


def cells() -> None:
    print("\nmodelled ms of a step: found by search over all meshes, and the experts' best under the same model")
    names = ("Megatron TP+SP", "FSDP", "Ulysses", "EP+TP")
    print(
        f"{'model':<42} {'devices':>18} {'found':>9} {'gap %':>6} {'s':>5}  "
        + " ".join(f"{n:>14}" for n in names)
        + "  plan"
    )
    count = worse = 0
    for name, sizes, devices, kinds in CELLS:
        model, args = getattr(plan_models, name)(**sizes)
        problem = trace_model(model, args, {})
        for kind in kinds:
            device = hardware(kind)
            memory = memory_of(None, device)
            result, wall, _ = timed(lambda: branch_and_bound(problem, device, devices, memory, keep=1))  # noqa: B023
            hit = result.solutions[0]
            rivals = experts(problem, model, device, devices, memory)
            count += 1
            worse += any(r is not None and r < hit.seconds * (1 - 1e-9) for r in rivals.values())
            label = f"{name} " + " ".join(f"{k}={v}" for k, v in sizes.items())
            cols = " ".join(f"{rivals[n] * 1e3:>14.1f}" if rivals.get(n) is not None else f"{'-':>14}" for n in names)
            print(
                f"{label:<42} {devices:>4} x {kind:<11} {hit.seconds * 1e3:>9.1f} {100 * result.gap:>6.2f} "
                f"{wall:>5.1f}  {cols}  {hit.layout}",
                flush=True,
            )
    print(f"{count} cells; an expert's plan is faster in {worse}")


def speed(whole: bool) -> None:
    print(f"\n{'search':<64} {'wall s':>7} {'cpu s':>6} {'meshes':>6} {'gap %':>6}  plan")
    cases = [
        (
            "Llama 8B, 32 layers, 64 x 910B2, given 2-D mesh dp=8 tp=8",
            lambda: plan_models.llama_8b(),
            {"mesh": {"dp": 8, "tp": 8}, "hardware": "ascend910b2"},
        ),
        (
            "Llama 8B, 32 layers, 64 x 910B2, all 5-D meshes",
            lambda: plan_models.llama_8b(),
            {"devices": 64, "hardware": "ascend910b2"},
        ),
        (
            "Llama 8B's layer, 8 of it, 64 x 910B2, all 5-D meshes",
            lambda: plan_models.llama_8b(layers=8),
            {"devices": 64, "hardware": "ascend910b2"},
        ),
        (
            "Llama 8B's layer, 80 of it, 64 x 910B2, all 5-D meshes",
            lambda: plan_models.llama_8b(layers=80),
            {"devices": 64, "hardware": "ascend910b2"},
        ),
        (
            "the same 8, given mesh dp=8 tp=8",
            lambda: plan_models.llama_8b(layers=8),
            {"mesh": {"dp": 8, "tp": 8}, "hardware": "ascend910b2"},
        ),
        (
            "the same 80, given mesh dp=8 tp=8",
            lambda: plan_models.llama_8b(layers=80),
            {"mesh": {"dp": 8, "tp": 8}, "hardware": "ascend910b2"},
        ),
        (
            "DeepSeek-V3, 61 layers, 512 x 910C, given 2-D mesh ep=64 tp=8",
            lambda: plan_models.deepseek_v3(),
            {"mesh": {"ep": 64, "tp": 8}, "hardware": "ascend910c"},
        ),
        (
            "DeepSeek-V3, 61 layers, 512 x 910C, given mesh pp=8 dp=2 ep=8 tp=4",
            lambda: plan_models.deepseek_v3(),
            {"mesh": {"pp": 8, "dp": 2, "ep": 8, "tp": 4}, "hardware": "ascend910c"},
        ),
    ]
    if whole:
        cases.append(
            (
                "DeepSeek-V3, 61 layers, 512 x 910C, all 5-D meshes",
                lambda: plan_models.deepseek_v3(),
                {"devices": 512, "hardware": "ascend910c"},
            )
        )
    for label, make, settings in cases:
        model, args = make()
        try:
            result, wall, busy = timed(lambda: plan(model, args, **settings))  # noqa: B023
        except ShardingError as e:
            print(f"{label:<64} {e}")
            continue
        print(
            f"{label:<64} {wall:>7.2f} {busy:>6.2f} {result.searched.outcome.layouts:>6} {100 * result.gap:>6.2f}  "
            f"{result.seconds * 1e3:.0f} ms, {result.memory / 2**30:.1f} GiB: {result.layout}",
            flush=True,
        )


LARGE = {
    "llama_405b": ({"batch": 2048, "length": 8192}, "ascend910c"),
    "deepseek_v3": ({"batch": 4096, "length": 4096}, "ascend910c"),
    "qwen3_235b": ({"batch": 2048, "length": 4096}, "ascend910c"),
}
"""Models on 2,048 devices."""


def large(name: str) -> dict[str, Any]:
    """One search over all meshes of 2,048 devices: seconds, largest resident memory, and the plan that was found."""
    sizes, kind = LARGE[name]
    model, args = getattr(plan_models, name)(**sizes)
    result, wall, busy = timed(lambda: plan(model, args, devices=2048, hardware=kind))
    return {
        "wall": wall,
        "busy": busy,
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "meshes": result.searched.outcome.layouts,
        "gap": result.gap,
        "plan": f"{result.seconds * 1e3:.0f} ms, {result.memory / 2**30:.1f} GiB: {result.layout}",
        "refused": len(result.refused),
    }


def large_in_processes() -> None:
    """Each in a process of its own, imports not timed but in its memory."""
    columns = f"{'wall s':>7} {'cpu s':>6} {'GiB':>5} {'meshes':>6} {'gap %':>6}"
    print(f"\n{'all 5-D meshes of 2,048 x 910C':<34} {columns}  plan")
    for name in LARGE:
        command = [sys.executable, "-m", "benchmarks.plan_search", "--one", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        r = json.loads(done.stdout.splitlines()[-1])
        refused = f"; {r['refused']} faster ones did not trace" if r["refused"] else ""
        print(
            f"{name:<34} {r['wall']:>7.2f} {r['busy']:>6.2f} {r['GiB']:>5.2f} {r['meshes']:>6} {100 * r['gap']:>6.2f}  "
            f"{r['plan']}{refused}",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", action="store_true", help="only compare with experts")
    parser.add_argument("--speed", action="store_true", help="only measure searches")
    parser.add_argument("--large", action="store_true", help="only search 2,048 devices for the largest models")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help="also search all meshes for DeepSeek-V3")
    given = parser.parse_args()
    print(
        f"{datetime.date.today()}, torch {torch.__version__}, scipy {scipy.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"{torch.get_num_threads()} thread"
    )
    plan(*plan_models.llama_8b(layers=4), mesh={"tp": 2}, hardware="ascend910b2")  # imports
    if given.one:
        print(json.dumps(large(given.one)))
    elif given.large:
        large_in_processes()
    else:
        if not given.cells:
            speed(given.whole)
        if not given.speed:
            cells()
