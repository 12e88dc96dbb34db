"""One meter for all rivals: interleaved step times and the peak memory of a step.

Times are medians over interleaved rounds (rival A, B, C, A, B, C ...), so that drift of the machine hits all alike.
Memory is the largest sum of allocations minus frees during one forward and backward, from the allocation events of
``torch.profiler``, beyond what was allocated when the step began; gradients of parameters are subtracted.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import time
from typing import Any, Callable, Sequence

import torch

Step = Callable[[], Any]


CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""What is timed; "processor", with one thread, on a machine that others use too."""


def interleaved(rivals: dict[str, Step], rounds: int, warmup: int = 2, clock: str = "wall") -> dict[str, list[float]]:
    """Seconds of every timed call, rival by rival; each round runs every rival once."""
    now = CLOCKS[clock]
    for step in rivals.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, step in rivals.items():
            start = now()
            step()
            times[name].append(now() - start)
    return times


def peak_bytes(step: Step, gradients: int) -> int:
    """Peak bytes of one step beyond what was live before it and beyond ``gradients`` bytes of parameter gradients."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    live: dict[int, int] = {}
    current = peak = 0
    for address, size in _allocations(profile):
        # A block from before, such as the last step's gradients, was never counted: freeing it must not count either.
        change = size if size > 0 else -live.pop(address, 0)
        if size > 0:
            live[address] = size
        current += change
        peak = max(peak, current)
    return peak - gradients


def _allocations(profile: Any) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation, and of each free with bytes below zero, in order."""
    events = []
    stack = list(profile.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if str(event.tag).endswith("Allocation"):
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    return [(address, size) for _, address, size in sorted(events, key=lambda e: e[0])]


def rivals(
    model: torch.nn.Module,
    inputs: dict[str, Any],
    loss_of: Callable[[Any], torch.Tensor],
    options: dict[str, Any] | None = None,
    names: Sequence[str] = ("eager", "inductor", "mindspeed"),
    **compile_options: Any,
) -> dict[str, Step]:
    """One training step of ``model`` under eager, Inductor and mindspeed, each compiled and run once; ``options`` are
    mindspeed's.
    """
    steps = {}
    for name in names:
        torch._dynamo.reset()
        own = {"options": options} if options and name == "mindspeed" else {}
        compiled = model if name == "eager" else torch.compile(model, backend=name, **compile_options, **own)
        steps[name] = training_step(model, compiled, inputs, loss_of)
        steps[name]()
    return steps


def race(title: str, model: torch.nn.Module, steps: dict[str, Step], rounds: int, clock: str = "wall") -> None:
    """Print interleaved times and peaks of ``steps``."""
    header(title)
    times = interleaved(steps, rounds, clock=clock)
    table(times, {name: peak_bytes(step, gradient_bytes(model)) for name, step in steps.items()}, "mindspeed")


def training_step(
    model: torch.nn.Module, compiled: Callable, inputs: dict[str, Any], loss_of: Callable[[Any], torch.Tensor]
) -> Step:
    """Forward, loss, backward; gradients freed before the step so that every step allocates them."""

    def step() -> torch.Tensor:
        for p in model.parameters():
            p.grad = None
        loss = loss_of(compiled(**inputs))
        loss.backward()
        return loss.detach()

    return step


def gradient_bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def header(title: str) -> None:
    print(
        f"# {title}\n# {datetime.date.today()}  torch {torch.__version__}  python {platform.python_version()}  threads "
        f"{torch.get_num_threads()}"
    )


def table(times: dict[str, list[float]], peaks: dict[str, int], baseline: str) -> None:
    """Medians, spread and ratios of ``baseline`` (ours) to every rival."""
    own, own_peak = statistics.median(times[baseline]), peaks.get(baseline)
    print(
        f"{'rival':<12}{'median ms':>11}{'min ms':>9}{'max ms':>9}{'peak MiB':>10}   {baseline}/rival: time, paired "
        "time, peak"
    )
    for name, seconds in times.items():
        paired = statistics.median(a / b for a, b in zip(times[baseline], seconds))
        peak = peaks.get(name)
        ratio = (
            f"{own / statistics.median(seconds):.3f}, {paired:.3f}, {own_peak / peak:.3f}"
            if peak
            else f"{own / statistics.median(seconds):.3f}, {paired:.3f}"
        )
        shown = f"{peak / 2**20:.1f}" if peak else "-"
        print(
            f"{name:<12}{statistics.median(seconds) * 1e3:>11.1f}{min(seconds) * 1e3:>9.1f}"
            f"{max(seconds) * 1e3:>9.1f}{shown:>10}   {ratio}"
        )


def arguments(**defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser.parse_args()
