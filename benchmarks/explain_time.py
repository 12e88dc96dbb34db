"""What ``explain`` takes beside compiling: compile and first step, ``explain``, its text and its page.

    python -m benchmarks.explain_time [--layers 4,8] [--codegen eager,inductor] [--rounds 3] [--clock wall]

A Hugging Face Llama (hidden 256, 2 x 128 tokens, float32), forward and backward. Both compile from nothing, in turn, in
one process: Dynamo is reset, and Inductor's caches are empty and new each time. A ratio is of two neighbours; its
median is told. On a machine that others use, ``--clock processor`` with OMP_NUM_THREADS=1 counts this process's own
time, which leaves out the C++ compiler.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import Any, Callable

import torch
from torch._inductor.utils import fresh_cache

import mindspeed_fx
from benchmarks import common
from benchmarks.first_step import build

BAR = 1.3


def compiled_step(model: torch.nn.Module, inputs: dict[str, Any], options: dict[str, Any]) -> None:
    torch.compile(model, backend="mindspeed", options=options)(**inputs).loss.backward()


def main(depths: list[int], codegens: list[str], rounds: int, clock: str) -> None:
    common.header(f"explain beside compile and first step: Hugging Face Llama, hidden 256, {clock} time, cold caches")
    for codegen in codegens:
        for layers in depths:
            row(layers, codegen, rounds, common.CLOCKS[clock])


def row(layers: int, codegen: str, rounds: int, now: Callable[[], float]) -> None:
    """One line: medians, and the ratio of neighbours."""
    model, inputs = build(layers)
    options = {"codegen": codegen}
    seconds: dict[str, list[float]] = {name: [] for name in ("compile", "explain", "print", "save")}
    reports: list[Any] = []
    steps: dict[str, Callable[[], Any]] = {
        "compile": lambda: compiled_step(model, inputs, options),
        "explain": lambda: reports.append(mindspeed_fx.explain(model, options=options, **inputs)),
    }
    for number in range(rounds + 1):  # the first warms up: imports, lookups of compilers
        for name in sorted(steps, reverse=bool(number % 2)):
            torch._dynamo.reset()
            model.zero_grad()
            with fresh_cache():
                start = now()
                steps[name]()
                seconds[name].append(now() - start)
        report = reports.pop()
        start = now()
        str(report)
        seconds["print"].append(now() - start)
        with tempfile.TemporaryDirectory() as folder:
            start = now()
            report.save(folder)
            seconds["save"].append(now() - start)
    timed = {name: values[1:] for name, values in seconds.items()}
    ratios = [e / c for e, c in zip(timed["explain"], timed["compile"])]
    told = [(e + p) / c for e, p, c in zip(timed["explain"], timed["print"], timed["compile"])]
    medians = ", ".join(f"{name} {statistics.median(values):.2f} s" for name, values in timed.items())
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(
        f"{layers} layers, codegen {codegen}: {medians}; explain / compile {statistics.median(ratios):.3f} ({spread}), "
        f"with its text {statistics.median(told):.3f}, asked {BAR}",
        flush=True,
    )


if __name__ == "__main__":
    chosen = common.arguments(layers="4,8", codegen="eager,inductor", rounds=3, clock="wall")
    main([int(n) for n in chosen.layers.split(",")], chosen.codegen.split(","), chosen.rounds, chosen.clock)
