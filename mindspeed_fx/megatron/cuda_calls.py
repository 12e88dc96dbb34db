"""``torch.cuda`` on a machine without CUDA, as far as Megatron's training calls it.

On an NPU without torch_npu's transfer_to_npu ``torch.npu`` answers (:func:`npu_call`). On a CPU there is one stream, on
which all is done when a call returns, and the memory of the process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import resource
import time
from typing import Any, Iterator

import torch
from torch import Tensor

from mindspeed_fx.megatron import groups
from mindspeed_fx.megatron.patches import WITHOUT_ACCELERATOR, WITHOUT_CUDA, Patch


class Event:
    """``torch.cuda.Event``: everything before it is done when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``."""
        return (end._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def wait(self, stream: Any = None) -> None:
        """Nothing is waited for."""


class Stream:
    """``torch.cuda.Stream``: the one stream of a CPU."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def wait_event(self, event: Any) -> None:
        """Nothing is waited for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing is waited for."""


_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    return _STREAM


def stream_context(stream: Any) -> Any:
    """``torch.cuda.stream``."""
    return contextlib.nullcontext()


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """What has no effect without CUDA: synchronize, empty_cache, set_device, ranges of a profiler."""


def resident_bytes(device: Any = None) -> int:
    """Bytes of main memory that the process holds now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def max_resident_bytes(device: Any = None) -> int:
    """The most bytes of main memory that the process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_stats(device: Any = None) -> dict[str, int]:
    """The counters of CUDA's allocator that Megatron logs; of a CPU only bytes are known."""
    stats: dict[str, int] = collections.defaultdict(int)
    stats["allocated_bytes.all.current"] = stats["reserved_bytes.all.current"] = resident_bytes()
    stats["allocated_bytes.all.peak"] = stats["reserved_bytes.all.peak"] = max_resident_bytes()
    return stats


def to_device(self: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
    """``Tensor.cuda`` and ``Module.cuda``."""
    return self.to(groups.kind() if device is None or not isinstance(device, torch.device) else device)


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """While Megatron decides by ``torch.cuda.device_count`` whether there is anything to set up."""
    before = torch.cuda.device_count
    torch.cuda.device_count = lambda: 1
    try:
        yield
    finally:
        torch.cuda.device_count = before


def rng_state(device: Any = "cpu") -> Tensor:
    """``torch.cuda.get_rng_state``: that of the CPU, which has the only generator."""
    return torch.get_rng_state()


def set_rng_state(state: Tensor, device: Any = "cpu") -> None:
    """``torch.cuda.set_rng_state``: the same."""
    torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """``torch.cuda.manual_seed``: the same."""
    torch.manual_seed(seed)


SHARED = {
    do_nothing: (
        "torch.cuda:synchronize",
        "torch.cuda:empty_cache",
        "torch.cuda:set_device",
        "torch.cuda:set_stream",
        "torch.cuda:check_error",
        "torch.cuda.nvtx:range_push",
        "torch.cuda.nvtx:range_pop",
    ),
    current_stream: ("torch.cuda:current_stream", "torch.cuda:default_stream"),
    resident_bytes: ("torch.cuda:memory_allocated", "torch.cuda:memory_reserved", "torch.cuda:device_memory_used"),
    max_resident_bytes: ("torch.cuda:max_memory_allocated", "torch.cuda:max_memory_reserved"),
}
"""What answers for several functions of ``torch.cuda``."""


def npu_call(target: str, without: Any) -> Any:
    """What ``torch.npu`` has under the name of ``target``, such as "torch.cuda:synchronize"; ``without`` where it has
    none (the ranges of NVIDIA's profiler).
    """
    module, name = target.split(":")
    answer = getattr(torch.npu, name, None) if module == "torch.cuda" else None
    if answer is None:
        return without
    return answer if isinstance(answer, type) else functools.partial(answer)


def table() -> list[Patch]:
    """``torch.cuda`` as far as Megatron's training calls it: ``torch.npu``'s functions on an NPU, else a CPU's."""
    names: dict[str, Any] = {
        "torch.cuda:Stream": Stream,
        "torch.cuda:Event": Event,
        "torch.cuda:stream": stream_context,
        "torch.cuda:memory_stats": memory_stats,
        "torch.cuda:get_rng_state": rng_state,
        "torch.cuda:set_rng_state": set_rng_state,
        "torch.cuda:manual_seed": manual_seed,
    }
    for function, targets in SHARED.items():
        # Dynamo knows torch's functions by name and refuses one object under two names.
        names |= {target: functools.partial(function) for target in targets}
    if groups.has_accelerator():
        reason = "Megatron's training loop calls it for the device of its process, an NPU"
        return [Patch(t, npu_call(t, cpu), reason, WITHOUT_CUDA) for t, cpu in names.items()]
    reason = "Megatron's training loop calls it; a CPU has one stream and the memory of the process"
    return [Patch(t, cpu, reason, WITHOUT_ACCELERATOR) for t, cpu in names.items()]
