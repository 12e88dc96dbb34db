"""Values and times of one problem: every rival on the same tensors."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, Callable

import torch

from mindspeed_fx.backend import mindspeed
from mindspeed_fx.report import recorder

from . import products, rows, sequences
from .problem import LATE, Function, Late, Problem, size

OURS = "mindspeed"
OWN = "own kernels"
"""Ours where Inductor generates nothing (codegen="eager"): every fused operator is a launch of its own."""
LISTED = 40
"""Kernels of a call that --out names."""
PROFILED = 3
"""Calls whose kernels are timed by the profiler."""
KERNELS = {**rows.PROBLEMS, **sequences.PROBLEMS, **products.PROBLEMS}


def problem_of(name: str, device: str, elements: int) -> Problem:
    torch.manual_seed(0)
    return KERNELS[name](device, elements) if name in rows.PROBLEMS else KERNELS[name](device)


def rivals_of(problem: Problem, device: str) -> dict[str, Function]:
    """Every rival's forward, ours first."""
    options = problem.options | ({"target": "cuda"} if device == "cpu" else {})
    results = {
        OURS: torch.compile(problem.define, backend=mindspeed, dynamic=False, options=options),
        OWN: torch.compile(problem.define, backend=mindspeed, dynamic=False, options=options | {"codegen": "eager"}),
        "inductor": torch.compile(problem.define, dynamic=False),
        "eager": problem.define,
    }
    return {n: f for n, f in results.items() if n not in problem.without} | problem.rivals


def _results(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


class Rival:
    """Forward and backward of one function on leaves of its own."""

    def __init__(self, forward: Function, problem: Problem, cotangents: list[torch.Tensor]):
        self.forward, self.others, self.cotangents = forward, problem.others, cotangents
        self.leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in problem.leaves]

    def run(self, meter: Callable[[Callable], tuple[float, Any]]) -> tuple[float, float, list[torch.Tensor]]:
        """Seconds of both directions, and the results and gradients."""
        forward, out = meter(lambda: _results(self.forward(*self.leaves, *self.others)))
        # Contiguous: AOTAutograd copies a gradient laid out otherwise, which is no part of the operator.
        cotangents = [c.to(o.dtype).contiguous() for c, o in zip(self.cotangents, out, strict=True)]
        backward, gradients = meter(lambda: torch.autograd.grad(out, self.leaves, cotangents))
        return forward, backward, [*(o.detach() for o in out), *gradients]


def cotangents_of(problem: Problem) -> list[torch.Tensor]:
    with torch.no_grad():
        return [torch.randn_like(o) for o in _results(problem.define(*problem.leaves, *problem.others))]


class Kernel:
    """One problem of the kernels: compiled and compared once, then timed."""

    def __init__(self, name: str, device: str, elements: int):
        self.problem, self.device, self.elements = problem_of(name, device, elements), device, elements
        self.functions = rivals_of(self.problem, device)
        self.cotangents = cotangents_of(self.problem)
        self.work = self.problem.moved, self.problem.flop

    def values(self) -> dict[str, float | str]:
        """Rival -> largest relative distance of a result or gradient from the reference; "failed: ..." where it has
        none. What begins with a rival's name and "launches" is the kernels that were chosen for our fused operators.
        """
        problem = self.problem
        exact = Problem(
            problem.define,
            [x.to(problem.exact) for x in problem.leaves],
            [x.to(problem.exact) if x.is_floating_point() else x for x in problem.others],
        )
        want = [x.cpu() for x in Rival(problem.define, exact, self.cotangents).run(_untimed)[2]]
        launches: dict[str, str] = {}

        def distance(rival: str, forward: Function) -> float:
            with recorder.collecting() as records:
                have = Rival(forward, problem, self.cotangents).run(_untimed)[2]
            if kernels := {row["kernel"] for record in records for row in record.lowered}:
                launches[f"{rival} launches"] = "; ".join(sorted(kernels))
            return max(
                ((h.cpu().to(w.dtype) - w).norm() / w.norm().clamp_min(1e-30)).item()
                for h, w in zip(have, want, strict=True)
            )

        result = of_each(self.functions, distance)
        self._move("cpu")
        return result | launches

    def times(self, rounds: int) -> dict[str, dict[str, Any]]:
        """Rival -> median milliseconds of the forward and of the backward, those that the device computes ("busy"), the
        kernels that take most, and MiB at the peak of both.
        """
        self._move(self.device)
        meter = Meter(self.device, self.elements)
        ready = {rival: Rival(f, self.problem, self.cotangents) for rival, f in self.functions.items()}
        for rival in ready.values():
            rival.run(meter)
            rival.run(meter)
        seconds: dict[str, list[tuple[float, float]]] = {rival: [] for rival in ready}
        peaks = {}
        for _ in range(rounds):
            for rival, run in ready.items():
                with Peak(meter.cuda) as peak:
                    seconds[rival].append(run.run(meter)[:2])
                peaks[rival] = peak.mib
        busy, kernels = seconds, {}
        if meter.cuda:
            busy = {rival: [run.run(device_time)[:2] for _ in range(PROFILED)] for rival, run in ready.items()}
            kernels = {rival: _kernels(run) for rival, run in ready.items()}
        self._move("cpu")
        return {
            rival: {"MiB": peaks[rival], **_medians(both, ""), **_medians(busy[rival], " busy")}
            | kernels.get(rival, {})
            for rival, both in seconds.items()
        }

    def _move(self, device: str) -> None:
        moved = {name: [x.to(device) for x in getattr(self.problem, name)] for name in ("leaves", "others")}
        self.problem = dataclasses.replace(self.problem, **moved)
        self.cotangents = [x.to(device) for x in self.cotangents]


def _medians(seconds: list[tuple[float, float]], what: str) -> dict[str, float]:
    """Milliseconds of both directions."""
    return {f"{n}{what}": 1e3 * statistics.median(c) for n, c in zip(("forward", "backward"), zip(*seconds))}


def device_time(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that the device computes in a call, and its result."""
    kernels, result = kernel_times(call)
    return sum(time for time, _ in kernels.values()) / 1e3, result


def kernel_times(call: Callable[[], Any]) -> tuple[dict[str, tuple[float, int]], Any]:
    """Kernel -> its milliseconds and launches in a call, those that take most first; and the call's result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        result = call()
        torch.cuda.synchronize()
    kernels = {row.key: (row.self_device_time_total / 1e3, row.count) for row in profile.key_averages()}
    return dict(sorted(kernels.items(), key=lambda item: -item[1][0])), result


def most(kernels: dict[str, tuple[float, int]]) -> dict[str, tuple[float, int]]:
    """The :data:`LISTED` first of ``kernels``, their names shortened."""
    return {name[:120]: kernels[name] for name in list(kernels)[:LISTED]}


def _kernels(rival: Rival) -> dict[str, dict[str, tuple[float, int]]]:
    both: list[dict[str, tuple[float, int]]] = []

    def meter(call: Callable[[], Any]) -> tuple[float, Any]:
        kernels, result = kernel_times(call)
        both.append(most(kernels))
        return 0.0, result

    rival.run(meter)
    return dict(zip(("forward kernels", "backward kernels"), both, strict=True))


def _untimed(call: Callable[[], Any]) -> tuple[float, Any]:
    return 0.0, call()


def of_each(rivals: dict[str, Any], value: Callable[[str, Any], float | str]) -> dict[str, float | str]:
    """Rival -> ``value(name, rival)``, or "failed: ..."; what failed leaves ``rivals``, as do all after one that was
    too late.
    """
    result: dict[str, float | str] = {}
    for name, rival in list(rivals.items()):
        try:
            if LATE in result.values():
                raise Late
            result[name] = value(name, rival)
        except (Exception, Late) as error:  # noqa: BLE001  a rival's limits are told
            result[name] = LATE if isinstance(error, Late) else f"failed: {told(error)}"
            del rivals[name]
    return result


def told(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['-'])[0][:150]}"


class Peak:
    """MiB allocated at the peak of what runs in it, beyond what was before."""

    def __init__(self, cuda: bool):
        self.cuda, self.mib = cuda, 0.0

    def __enter__(self) -> Peak:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.cuda:
            self.mib = (torch.cuda.max_memory_allocated() - self.before) / 2**20


COPIES = 3
"""Of 1 GiB moved each: 0.75 ms on an H200, in which the launches of a compiled rival's forward or backward end."""


class Meter:
    """Seconds of one call on ``device``."""

    def __init__(self, device: str, elements: int):
        self.cuda = device == "cuda"
        self.source = torch.empty(8 * elements, dtype=torch.bfloat16, device=device)
        self.sink = torch.empty_like(self.source)

    def __call__(self, call: Callable[[], Any]) -> tuple[float, Any]:
        if not self.cuda:
            start = time.perf_counter()
            result = call()
            return time.perf_counter() - start, result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(COPIES):
            self.sink.copy_(self.source)
        start.record()
        result = call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, result

    def copy_bandwidth(self) -> float:
        """Bytes per second of a copy, read and written."""
        times = [self(lambda: self.sink.copy_(self.source))[0] for _ in range(10)]
        return 2 * size(self.source) / statistics.median(times)

    def product_rate(self) -> float:
        """FLOP per second of a large product of bfloat16."""
        n = 8192 if self.cuda else 256
        a, b = (torch.randn(n, n, device=self.source.device).to(torch.bfloat16) for _ in range(2))
        return 2 * n**3 / statistics.median([self(lambda: a @ b)[0] for _ in range(10)])
