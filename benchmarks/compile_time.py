"""Cold and warm start, share of our own passes, and overhead per call: mindspeed beside Inductor.

    python -m benchmarks.compile_time [--rounds 3]

Cold: a new process with an empty cache directory, first step (forward and backward) of the 4-layer Megatron GPT of
megatron_gpt.py. Warm: the same again with the cache it left. Rivals alternate. Overhead: a one-line model, called
    often.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import common


def child(backend: str) -> None:
    """One process: print seconds of the first step and, for ours, of the passes."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    from benchmarks import megatron_gpt

    dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    case = megatron_gpt.CASES["512"]
    model = megatron_gpt.build(torch.float32, **case)
    inputs = megatron_gpt.make_inputs(**case)
    own = {}
    if backend == "mindspeed":
        from mindspeed_fx import backend as ours

        finish = ours.recorder.finish
        ours.recorder.finish = lambda record: (own.update(record.seconds), finish(record))
    model(**inputs).mean().backward()  # eager once: neither rival pays for loading libraries
    start = time.perf_counter()
    torch.compile(model, backend=backend, fullgraph=True)(**inputs).mean().backward()
    print(
        json.dumps(
            {"seconds": time.perf_counter() - start, **{k: own.get(k, 0.0) for k in ("capture", "passes", "lowering")}}
        )
    )


def measure(backend: str, cache: str) -> dict[str, float]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, __file__, "--child", backend], capture_output=True, text=True, env=env, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def overhead(calls: int = 3000) -> dict[str, float]:
    """Microseconds of one forward call of a compiled one-operator model; interleaved blocks, median."""
    import torch

    x = torch.randn(8)
    compiled = {}
    for backend in ("inductor", "mindspeed"):
        torch._dynamo.reset()
        compiled[backend] = torch.compile(lambda x: x + 1, backend=backend)
        compiled[backend](x)
    blocks: dict[str, list[float]] = {b: [] for b in compiled}
    for _ in range(15):
        for backend, f in compiled.items():
            start = time.perf_counter()
            for _ in range(calls):
                f(x)
            blocks[backend].append((time.perf_counter() - start) / calls * 1e6)
    return {b: statistics.median(v) for b, v in blocks.items()}


def main(rounds: int) -> None:
    common.header("compile time, Megatron-core GPT, 4 layers, hidden 512, forward and backward")
    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for backend in ("inductor", "mindspeed"):
            cache = tempfile.mkdtemp()
            for start in ("cold", "warm"):
                results.setdefault((start, backend), []).append(measure(backend, cache))
            shutil.rmtree(cache)
    medians = {key: statistics.median(r["seconds"] for r in rows) for key, rows in results.items()}
    for start in ("cold", "warm"):
        print(
            f"{start}: inductor {medians[start, 'inductor']:.2f} s, mindspeed {medians[start, 'mindspeed']:.2f} s, "
            f"ratio {medians[start, 'mindspeed'] / medians[start, 'inductor']:.3f}"
        )
    for start in ("cold", "warm"):
        rows = results[start, "mindspeed"]
        shares = {n: statistics.median(r[n] / r["seconds"] for r in rows) for n in ("capture", "passes", "lowering")}
        print(f"{start}, our own share: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items()))
    calls = overhead()
    print(
        f"one call: inductor {calls['inductor']:.1f} us, mindspeed {calls['mindspeed']:.1f} us, difference "
        f"{calls['mindspeed'] - calls['inductor']:.1f} us"
    )


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[-1])
    else:
        main(common.arguments(rounds=3).rounds)
