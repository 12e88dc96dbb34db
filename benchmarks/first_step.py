"""The first step of a deep model: Inductor, mindspeed, mindspeed with the code of every layer made for itself, and both
with every layer marked by ``torch.compiler.nested_compile_region``, so that Dynamo reads one of them.

    python -m benchmarks.first_step [--layers 4,32] [--rounds 1] [--steps 9]

A Hugging Face Llama (hidden 256, 128 tokens, float32). First steps, forward and backward, each in a process of its own
with an empty cache directory, rivals in turn. Then, in one process for each depth, later steps, interleaved, and the
peak of a step, with shared layers and without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks import common

EACH = {"disable": ["lowering.repeated_layers"]}
RIVALS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "inductor": ("inductor", None),
    "mindspeed": ("mindspeed", {}),
    "mindspeed, each layer": ("mindspeed", EACH),
    "inductor, marked": ("inductor", None),
    "mindspeed, marked": ("mindspeed", {}),
}


def build(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1024,
        max_position_embeddings=128,
    )
    ids = torch.randint(0, 1024, (2, 128))
    return LlamaForCausalLM(config), dict(input_ids=ids, labels=ids, use_cache=False)


def child(layers: int, rival: str) -> None:
    """One process: the seconds of the first step."""
    model, inputs = build(layers)
    model(**inputs).loss.backward()  # eager once: no rival pays for loading libraries
    if rival.endswith("marked"):
        kind = type(model.model.layers[0])
        kind.forward = torch.compiler.nested_compile_region(kind.forward)
    backend, options = RIVALS[rival]
    start = time.perf_counter()
    torch.compile(model, backend=backend, options=options, fullgraph=True)(**inputs).loss.backward()
    print(json.dumps(time.perf_counter() - start))


def first(layers: int, rival: str) -> float:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.first_step", "--child", f"{layers}:{rival}"],
            capture_output=True,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
            check=True,
        )
    return json.loads(done.stdout.splitlines()[-1])


def later(layers: int, rounds: int) -> None:
    """Steps and peaks with shared layers and without."""
    model, inputs = build(layers)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    steps = {}
    for name in ("mindspeed", "mindspeed, each layer"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="mindspeed", options=RIVALS[name][1], fullgraph=True)

        def step(compiled: Any = compiled) -> None:
            model.zero_grad()
            compiled(**inputs).loss.backward()

        step()
        steps[name] = step
    times = {name: statistics.median(seconds) for name, seconds in common.interleaved(steps, rounds).items()}
    ours, each = times.values()
    peaks = [common.peak_bytes(step, gradients) / 2**20 for step in steps.values()]
    print(
        f"{layers} layers, a later step: shared {ours * 1e3:.0f} ms, each {each * 1e3:.0f} ms, "
        f"ratio {ours / each:.3f}; "
        f"peaks {peaks[0]:.1f} and {peaks[1]:.1f} MiB, ratio {peaks[0] / peaks[1]:.3f}",
        flush=True,
    )


def main(depths: list[int], rounds: int, steps: int) -> None:
    common.header("first step of a Hugging Face Llama, hidden 256, 128 tokens, float32")
    medians: dict[tuple[int, str], float] = {}
    for layers in depths:
        seconds: dict[str, list[float]] = {rival: [] for rival in RIVALS}
        for _ in range(rounds):
            for rival in RIVALS:
                seconds[rival].append(first(layers, rival))
        for rival, values in seconds.items():
            medians[layers, rival] = value = statistics.median(values)
            growth = value / medians[depths[0], rival]
            of = value / medians[layers, "inductor"]
            print(
                f"{layers} layers, {rival}: {value:.1f} s, {of:.2f} of inductor, {growth:.2f} of {depths[0]} layers",
                flush=True,
            )
    for layers in depths:
        later(layers, steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", default="")
    parser.add_argument("--layers", default="4,32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=9)
    options = parser.parse_args()
    if options.child:
        layers, rival = options.child.split(":")
        child(int(layers), rival)
    else:
        main([int(n) for n in options.layers.split(",")], options.rounds, options.steps)
