"""The process that writes checkpoints beside training (``--async-save --use-persistent-ckpt-worker``) without CUDA.

Megatron spawns it, so that nothing of the adaptor is in it, and it begins by dividing by the number of CUDA devices: it
ends there, and training waits for it for ever. Here what is spawned is a function of ours, whose process imports the
adaptor before it goes into Megatron's loop. On a CPU what it is sent is the memory that training writes its next step
into: it copies that first, as it would from a device.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any, Iterator

import torch
from torch import Tensor

from mindspeed_fx.megatron import groups, patches
from mindspeed_fx.megatron.patches import WITHOUT_ACCELERATOR, WITHOUT_CUDA, Patch

LOOP = "dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.async_loop"
PRELOAD = "dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.preload_tensors"


def async_loop(*args: Any, **kwargs: Any) -> None:
    """``PersistentAsyncCaller.async_loop``, pickled by this name."""
    importlib.import_module("mindspeed_fx.megatron_adaptor")  # by name: it imports the table that has this function
    with _counted_devices():
        patches.original(LOOP)(*args, **kwargs)


@contextlib.contextmanager
def _counted_devices() -> Iterator[None]:
    """``torch.cuda.device_count`` is that of this machine's devices, a CPU being one."""
    before, module = torch.cuda.device_count, getattr(torch, groups.kind())
    torch.cuda.device_count = getattr(module, "device_count", lambda: 1)
    try:
        yield
    finally:
        torch.cuda.device_count = before


def preload_tensors(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
    """``FileSystemWriterAsync.preload_tensors``; memory that two processes see is copied, a fork's own is not.

    Args:
        write_buckets: (file, key, (bytes, [(item, tensor)])), a file each.
        non_blocking: of copies from a device.
    """
    buckets = patches.original(PRELOAD)(write_buckets, non_blocking)
    return [(file, key, (data, _copied(tensors))) for file, key, (data, tensors) in buckets]


def _copied(tensors: list[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
    return [(item, tensor.clone() if tensor.is_shared() else tensor) for item, tensor in tensors]


def table() -> list[Patch]:
    reason = "divides by the number of CUDA devices, in a process that knows nothing of the adaptor"
    patches = [Patch(LOOP, staticmethod(async_loop), reason, WITHOUT_CUDA)]
    if not groups.has_accelerator():
        moves = "what is on the host already is written while the next step changes it"
        patches.append(Patch(PRELOAD, staticmethod(preload_tensors), moves, WITHOUT_ACCELERATOR))
    return patches
