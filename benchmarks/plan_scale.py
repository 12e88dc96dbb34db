"""Trace and compile time of one rank's program, by number of ranks and by number of layers; user processor seconds.

    python -m benchmarks.plan_scale [--plan zero3+tp_sp] [--ranks 8,64,1024] [--layers 4,16,64] [--rounds 1]
        [--codegen eager,inductor]

A Llama (hidden 256, float32, 64 tokens and one row a rank of dp) under a plan of two parts, dp and four ranks of the
second (zero3+tp_sp, zero2+tp_sp, zero2+ulysses; zero2+ep_alltoall has 8 experts of ffn 512 and a row on every rank), as
rank 0 of so many fake ranks, whose collectives send nothing: first step, forward and backward, each in a process of its
own with an empty cache. Ranks are compared at 4 layers, layers at 8 ranks. "eager" is tracing and passes, "inductor"
adds code; the compilers that Inductor starts are counted too. Beside it the model as it is, not parallelized. The
kernel's seconds are left out: of one cell they were 2 in one run and 29 in the next, on a machine that others used.
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

INNER = 4
"""Ranks of the plan's second part."""
PLAN = "zero3+tp_sp"
DIMS = {"tp_sp": "tp", "ulysses": "cp", "ep_alltoall": "ep"}
"""Second part of a plan -> its mesh dimension."""


def busy() -> float:
    """User seconds of this process and of those that it started and that ended."""
    return sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def child(ranks: int, layers: int, codegen: str, plan: str = PLAN) -> None:
    """One process: user seconds of the first step."""
    import torch
    import torch._inductor.compile_fx  # noqa: F401
    from torch.distributed.device_mesh import init_device_mesh

    import mindspeed_fx
    import mindspeed_fx.backend  # noqa: F401
    from mindspeed_fx.sharding.spmd import program  # noqa: F401
    from tests.sharding.llama import Llama
    from tests.sharding.mixtral import Mixtral

    dim = DIMS[plan.split("+")[1]]
    rows = max(ranks // (1 if dim == "ep" else INNER), 1)
    ids, labels = (torch.randint(0, 1024, (rows, 64)) for _ in range(2))
    sizes = {"hidden": 256, "heads": 4, "kv_heads": 4, "vocab": 1024}
    with torch.device("meta"):
        model = Mixtral(layers, ffn=512, experts=8, **sizes) if dim == "ep" else Llama(layers, ffn=1024, **sizes)
    if ranks == 1:
        model = model.to_empty(device="cpu")
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks // INNER, INNER), mesh_dim_names=("dp", dim))
        mindspeed_fx.parallelize(model, mesh, plan, init=lambda module: None)
    step = torch.compile(model, backend="mindspeed", fullgraph=True, dynamic=False, options={"codegen": codegen})
    start = busy()
    step(ids, labels).backward()
    print(json.dumps(busy() - start))


def first(ranks: int, layers: int, codegen: str, plan: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.plan_scale", "--child", f"{ranks}:{layers}:{codegen}:{plan}"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def main(ranks: list[int], depths: list[int], rounds: int, codegens: list[str], plan: str) -> None:
    common.header(f"first step of one rank's program under {plan}, user processor seconds, empty caches")
    base, least = ranks[0], depths[0]
    cells = [*((n, least) for n in ranks), *((base, k) for k in depths[1:]), *((1, k) for k in depths)]
    for codegen in codegens:
        seconds: dict[tuple[int, int], float] = {}
        for n, k in cells:
            seconds[n, k] = statistics.median(first(n, k, codegen, plan) for _ in range(rounds))
            beside = f"{seconds[n, k] / seconds[n if n == 1 else base, least]:.2f}"
            of = "4 layers" if n == 1 or k != least else f"{base} ranks"
            name = "not parallelized" if n == 1 else f"{n:>5} ranks"
            print(f"{codegen:<9} {name:<17} {k:>3} layers {seconds[n, k]:7.1f} s  {beside} of {of}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", default="")
    parser.add_argument("--plan", default=PLAN)
    parser.add_argument("--ranks", default="8,64,1024")
    parser.add_argument("--layers", default="4,16,64")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--codegen", default="eager,inductor")
    given = parser.parse_args()
    if given.child:
        n, k, how, plan = given.child.split(":")
        child(int(n), int(k), how, plan)
    else:
        sizes = ([int(n) for n in text.split(",")] for text in (given.ranks, given.layers))
        main(*sizes, given.rounds, given.codegen.split(","), given.plan)
