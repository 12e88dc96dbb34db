"""The first step of a new process: from a file of ``save_compiled``, and from warm caches, Inductor's and ours.

    python -m benchmarks.saved_step [--layers 4,16] [--rounds 3]

A Hugging Face Llama (hidden 256, 128 tokens, float32), forward and backward, each start in a process of its own, rivals
in turn. Seconds count from the end of the imports and of the making of the model to the end of the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks import common
from benchmarks.first_step import build

RIVALS = ("loaded", "inductor", "mindspeed")


def step(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    return model(**inputs).loss


def child(layers: int, rival: str, file: str) -> None:
    """One process; with rival "save" it writes the file."""
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    import mindspeed_fx
    import mindspeed_fx.backend

    model, inputs = build(layers)
    if rival == "save":
        mindspeed_fx.save_compiled(step, file, (model, inputs))
        return
    start = time.perf_counter()
    compiled: Any
    if rival == "loaded":
        compiled = mindspeed_fx.load_compiled(step, file)
    else:
        compiled = torch.compile(step, backend=rival, fullgraph=True)
    compiled(model, inputs).backward()
    seconds = time.perf_counter() - start
    if rival == "loaded" and (why := compiled.reason or compiled.misses):
        raise SystemExit(f"the file was not used: {why}")
    print(json.dumps(seconds))


def start(layers: int, rival: str, file: pathlib.Path, cache: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.saved_step", "--child", f"{layers}:{rival}", "--file", str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        check=True,
    )
    return done.stdout


def main(depths: list[int], rounds: int) -> None:
    common.header("first step of a new process, Hugging Face Llama, hidden 256, 128 tokens, float32")
    for layers in depths:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            file = folder / "step.mfx"
            for rival in ("save", *RIVALS[1:]):  # fills caches
                start(layers, rival, file, folder / rival)
            seconds: dict[str, list[float]] = {rival: [] for rival in (*RIVALS, "loaded, empty cache")}
            for turn in range(rounds):
                for rival in RIVALS:
                    cache = folder / ("save" if rival == "loaded" else rival)
                    seconds[rival].append(json.loads(start(layers, rival, file, cache).splitlines()[-1]))
                empty = start(layers, "loaded", file, folder / f"empty-{turn}")
                seconds["loaded, empty cache"].append(json.loads(empty.splitlines()[-1]))
            size = file.stat().st_size / 2**20
        medians = {rival: statistics.median(values) for rival, values in seconds.items()}
        for rival, median in medians.items():
            of = median / medians["inductor"]
            print(f"{layers} layers, {rival}: {median:.2f} s, {of:.2f} of inductor's warm start", flush=True)
        print(f"{layers} layers, the file: {size:.2f} MiB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", default="")
    parser.add_argument("--file", default="")
    parser.add_argument("--layers", default="4,16")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.child:
        depth, rival = options.child.split(":")
        child(int(depth), rival, options.file)
    else:
        main([int(n) for n in options.layers.split(",")], options.rounds)
