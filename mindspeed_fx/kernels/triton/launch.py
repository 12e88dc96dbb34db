"""How a kernel is started: how many programs, how many warps, on which device. Triton is not imported here."""

from __future__ import annotations

import contextlib
import functools
import importlib
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

THREAD = 16
"""Elements of a tile per thread: two 16-byte loads of a 16-bit type."""

INTERPRETED = 3
"""Programs in the interpreter: few, so that there too a program has several pieces of work."""


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``: upstream Triton's tiles have no other sizes."""
    return 1 << max(0, n - 1).bit_length()


def warps(elements: int, thread: int = THREAD) -> int:
    """Warps for a tile of ``elements``, ``thread`` per thread."""
    return min(32, max(1, power_of_two(elements // (32 * thread))))


def stages(x: Tensor, loaded: int) -> int:
    """Turns of a loop that are under way at a time, each loading ``loaded`` bytes: up to three, as many as three
    quarters of the shared memory hold; sums over the rows need the rest. Measured:
    benchmarks/results/2026-11-27-gpu_launches.txt.
    """
    return 2 if x.device.type == "npu" else max(1, min(3, _shared_memory(x.device) * 3 // 4 // loaded))


def programs(x: Tensor, work: int, num_warps: int, resident: int | None) -> int:
    """Size of the grid: enough programs to put ``resident`` warps on every multiprocessor, no more than pieces of work;
    None: one for each piece, where nothing is kept from one to the next. On an NPU one for each vector core.
    """
    if x.device.type == "npu":
        return min(work, importlib.import_module("mindspeed_fx.kernels.triton.npu").cores(x.device))
    if x.device.type != "cuda":
        return min(work, INTERPRETED)
    return work if resident is None else min(work, _multiprocessors(x.device) * max(1, resident // num_warps))


def only_cuda(x: Tensor) -> bool:
    """Whether a kernel that CUDA alone wants may be started for ``x``: not on an NPU, nor where what goes elsewhere is
    for one.
    """
    return x.device.type != "npu" and not (_instead and _instead[-1][1])


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; of what is no CUDA device, the least of any since sm_80."""
    if device.type != "cuda":
        return 99 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def launch(kernel: Any, grid: int, *args: Any, num_warps: int, **constants: Any) -> None:
    """Start ``kernel`` on ``grid`` programs, on the device of its first argument; an empty grid is no launch."""
    if _instead:
        _instead[-1][0](kernel, grid, args, num_warps, constants)
    elif grid and args[0].device.type == "npu":
        importlib.import_module("mindspeed_fx.kernels.triton.npu").start(kernel, grid, args, constants)
    elif grid:
        with torch.cuda.device_of(args[0]):
            kernel[(grid,)](*args, num_warps=num_warps, **constants)


_instead: list[tuple[Callable, bool]] = []


def is_redirected() -> bool:
    """Whether launches go elsewhere than to a device: :func:`launching`."""
    return bool(_instead)


@contextlib.contextmanager
def launching(instead: Callable[[Any, int, tuple, int, dict[str, Any]], None], for_npu: bool = False) -> Iterator[None]:
    """In here ``instead(kernel, grid, args, num_warps, constants)`` is called in the place of every launch.

    With ``for_npu`` launches are those that an NPU would make, whatever the device of the tensors.
    """
    _instead.append((instead, for_npu))
    try:
        yield
    finally:
        _instead.pop()


def as_rows(x: Tensor) -> Tensor:
    """``x`` [..., width] as [rows, width] with adjacent elements in a row; copies what is laid out otherwise."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()
