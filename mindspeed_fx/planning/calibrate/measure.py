"""Times the cases on a device, each compiled as a model would be, beside the kernels that the cost model counts."""

from __future__ import annotations

from typing import Any, Callable

import torch

from mindspeed_fx.cost.operators import Cost
from mindspeed_fx.planning.calibrate.cases import Case, Row
from mindspeed_fx.planning.calibrate.timing import Timing, clock, repeat, time_step, wait_until_quiet
from mindspeed_fx.report import recorder
from mindspeed_fx.report.modelled import estimated

Progress = Callable[[str], None]
"""Told what is timed next."""
TRIES = 3
"""How often a noisy timing is taken, each time when the machine is quiet, before it stands as it is."""
COPY = 2**26
"""Bytes of a copy to the host."""
ON_DEVICE = 10
"""Calls that an accelerator is given at once, so that the wait for it counts little."""


def measure_cases(
    cases: list[Case], device: torch.device, seconds: float, progress: Progress, tries: int = TRIES
) -> list[Row]:
    """A row for the forward and one for the backward of every case.

    Args:
        seconds: of timing for each case, compiling not counted.
        tries: how often a noisy timing is taken.
    """
    rows = []
    for case in cases:
        progress(f"{case.kind} {case.label} {str(case.dtype).removeprefix('torch.')}")
        rows += measure_case(case, device, seconds, tries)
    return rows


def measure_case(case: Case, device: torch.device, seconds: float, tries: int = TRIES) -> list[Row]:
    """The rows of one case."""
    inputs = case.inputs(device)
    torch._dynamo.reset()
    with recorder.collecting() as graphs:
        step = torch.compile(case.function, backend="mindspeed", fullgraph=True, dynamic=False)
        result = step(*inputs)
        result.backward(result.detach())
    calls = 1 if device.type == "cpu" else ON_DEVICE
    cold = device.type == "cpu" and case.kind != "launch"
    best: list[Timing] = []
    for _ in range(tries):
        if tries > 1:
            wait_until_quiet()
        timings = repeat(lambda: time_step(step, inputs, calls, cold), seconds)
        best = [min(pair, key=lambda t: (t.is_noisy, t.spread)) for pair in zip(best or timings, timings)]
        if not any(t.is_noisy for t in best):
            break
    record = graphs[0]
    dtype = str(case.dtype).removeprefix("torch.")
    return [
        Row(case.kind, case.label, dtype, stage, t.seconds, t.spread, kernels_of(record, stage), t.is_noisy)
        for stage, t in zip(("forward", "backward"), best)
    ]


def kernels_of(record: Any, stage: str) -> tuple[Cost, ...]:
    """What the cost model counts for a graph, whatever the device."""
    return tuple(node.cost for node in estimated(record, stage, "cpu").nodes)


def measure_copies(device: torch.device, seconds: float, progress: Progress) -> list[Row]:
    """Copies between device memory and pinned host memory, both ways; [] on a processor, which has one memory."""
    if device.type == "cpu":
        return []
    on_device = torch.empty(COPY, dtype=torch.uint8, device=device)
    on_host = torch.empty(COPY, dtype=torch.uint8, pin_memory=True)
    rows = []
    for label, target, source in (("to the host", on_host, on_device), ("to the device", on_device, on_host)):
        progress(f"copy {label}")

        def sample(target: torch.Tensor = target, source: torch.Tensor = source) -> tuple[float]:
            start = clock(device)
            target.copy_(source, non_blocking=True)
            return (clock(device) - start,)

        (timing,) = repeat(sample, seconds)
        rows.append(Row("copy", label, "uint8", "", timing.seconds, timing.spread, (), timing.is_noisy))
    return rows
