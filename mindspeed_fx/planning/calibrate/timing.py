"""How long a call takes on a device, and how sure that is."""

from __future__ import annotations

import functools
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable

import torch

NOISE = 0.25
"""Spread of timings above which they are not to be fitted; a virtual server shows up to 0.2 for calls of 100 us."""
BUSY = 0.1
"""Share of the processor's time in other processes above which timings are not to be fitted."""
FEWEST = 5
"""Timings of which a median is taken, however long they take; :data:`SLOW` seconds each excepted."""
SLOW = 2.0
FILLED = 2**27
"""Bytes that are more than any last-level cache of a processor's socket share holds."""


@dataclass(frozen=True)
class Timing:
    """Repeated timings of one thing."""

    seconds: float
    """The median."""
    spread: float
    """Distance of the quartiles over the median."""
    count: int
    others: float = 0.0
    """Share of the processor's time that other processes took meanwhile."""

    @property
    def is_noisy(self) -> bool:
        return self.spread > NOISE or self.others > BUSY


def summarize(samples: list[float], others: float = 0.0) -> Timing:
    """Median and spread of at least two timings in seconds."""
    low, median, high = statistics.quantiles(samples, n=4)
    return Timing(median, (high - low) / median if median else 0.0, len(samples), others)


def repeat(sample: Callable[[], tuple[float, ...]], seconds: float) -> list[Timing]:
    """Timings of every number that ``sample`` gives, called for about ``seconds``; its first call warms up."""
    sample()
    rows: list[tuple[float, ...]] = []
    watch = ProcessorWatch()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rows) < FEWEST:
        rows.append(sample())
        if len(rows) >= 2 and sum(rows[-1]) > SLOW and time.perf_counter() >= end:
            break
    others = watch.share_of_others()
    return [summarize(list(column), others) for column in zip(*rows)]


def clock(device: torch.device) -> float:
    """Seconds of the host's clock when all work given to the device is done."""
    synchronize(device)
    return time.perf_counter()


def synchronize(device: torch.device) -> None:
    """Wait for the device; nothing on a processor."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def time_step(
    step: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], calls: int, cold: bool = False
) -> tuple[float, float]:
    """Seconds of a forward and of a backward; ``calls`` of each are given to the device at once.

    Args:
        step: returns one tensor with a gradient.
        inputs: leaves.
        cold: a processor's caches hold none of the operands: a model's weights and saved tensors are elsewhere too, and
            the cost model has no cache of a processor.
    """
    device = inputs[0].device
    for tensor in inputs:
        tensor.grad = None
    if cold:
        fill_caches()
    start = clock(device)
    results: list[Any] = [step(*inputs) for _ in range(calls)]
    middle = clock(device)
    gradients = [result.detach() for result in results]
    if cold:
        fill_caches()
    begin = clock(device)
    for result, gradient in zip(results, gradients):
        result.backward(gradient)
    end = clock(device)
    return (middle - start) / calls, (end - begin) / calls


@functools.cache
def _others(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def fill_caches() -> None:
    """Fill a processor's caches with what nobody needs."""
    _others(FILLED).add_(1)


class ProcessorWatch:
    """How much of this machine's processor others use while something is timed: two threads that share a core wait for
    one another at every loop, for times that do not even vary."""

    def __init__(self) -> None:
        self.start = _busy_seconds()

    def share_of_others(self) -> float:
        """Seconds of other processes over all that the cores have had since the start; 0 where the system keeps no
        such record (it is Linux's)."""
        if self.start is None or (end := _busy_seconds()) is None:
            return 0.0
        wall, busy, own = (after - before for after, before in zip(end, self.start))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1)) if wall else 0.0


def wait_until_quiet(limit: float = 20.0) -> None:
    """Wait until other processes leave the processor alone, such as compilers that start beside this one."""
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        watch = ProcessorWatch()
        time.sleep(0.3)
        if watch.share_of_others() < BUSY / 2:
            return


def _busy_seconds() -> tuple[float, float, float] | None:
    """Wall clock, seconds in which cores were busy, and those of this process with its threads."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, *rest = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return None
    ticks = user + nice + system + sum(rest[:3])  # interrupts, and what a host took of a virtual machine
    return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])
