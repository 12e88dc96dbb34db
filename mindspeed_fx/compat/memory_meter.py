"""Part of :mod:`mindspeed_fx.compat`: bytes that a Python function has alive while it runs on fake tensors.

Nothing is computed and nothing is allocated. Memory lives as long as Python holds it, so a local name that outlives its
last use counts, as it does when the function really runs.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_fx.compat import fake, tracing


class _Meter(TorchDispatchMode):
    def __init__(self, arguments: Sequence[torch.Tensor]):
        super().__init__()
        self.input_storages = {fake.storage_of(t) for t in arguments}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive = {key: entry for key, entry in self.alive.items() if not entry[0].expired()}
        for value in pytree.tree_leaves(out):
            if (
                isinstance(value, torch.Tensor)
                and (key := fake.storage_of(value)) not in self.input_storages
                and key not in self.alive
            ):
                storage = value.untyped_storage()
                self.alive[key] = (StorageWeakRef(storage), fake.hint(storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def workspace(run: Callable, values: Sequence[Any]) -> int:
    """The most bytes that ``run(*values)`` has alive at once beside ``values`` and its results.

    Args:
        values: fake tensors and other values.
    """
    mode = tracing.fake_mode_of(values)
    with tracing.symbols_given_up(mode, on_error=False), mode or contextlib.nullcontext(), torch.no_grad():
        with (meter := _Meter([v for v in values if isinstance(v, torch.Tensor)])):
            out = run(*values)
        results = {
            fake.storage_of(t): fake.hint(t.untyped_storage().nbytes())
            for t in pytree.tree_leaves(out)
            if isinstance(t, torch.Tensor)
        }
    return max(0, meter.peak - sum(size for key, size in results.items() if key not in meter.input_storages))
