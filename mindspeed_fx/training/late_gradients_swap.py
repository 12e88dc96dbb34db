"""What gradients of weights that are made late read waits in host memory (MindSpeed's ``--use-nanopipe-swap``).

    put          its copies to the host start
    next put     the copies are over, and the device's memory is free: one entry is on its way at a time
    before it is run: its copies back start when the entry before it runs; then they are waited for

The tensors are the same bits. What is small stays, as do the weights and what is no dense block of memory of its own.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from mindspeed_fx.kernels import copies

SMALLEST = 2**20
"""Bytes of a tensor below which it stays (MindSpeed's limit)."""


class Entry:
    """The values that a late part reads.

    Args:
        values: tensors and others; the caller drops its own.
        kept: tensors that stay on the device in any case: weights.
        smallest: bytes below which a tensor stays; None: ``SMALLEST``.
    """

    def __init__(self, values: Sequence[Any], kept: Sequence[Tensor], smallest: int | None = None) -> None:
        self.values = list(values)
        self.smallest = SMALLEST if smallest is None else smallest
        self.stays = {t.untyped_storage().data_ptr() for t in kept}
        self.leaving: dict[int, Tensor] = {}
        self.hosts: dict[int, tuple[Tensor, torch.device]] = {}
        self.coming: dict[int, Tensor] = {}

    def begin_leaving(self) -> None:
        """Starts the copies to the host."""
        for i, x in enumerate(self.values):
            if isinstance(x, Tensor) and self._can_leave(x):
                self.leaving[i] = copies.offload(x.detach())

    def _can_leave(self, x: Tensor) -> bool:
        size = x.numel() * x.element_size()
        storage = x.untyped_storage()
        is_dense = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()
        is_whole = is_dense and size == storage.nbytes()
        return size >= self.smallest and is_whole and storage.data_ptr() not in self.stays

    def leave(self) -> None:
        """The device's memory is free when this has returned, or will be when its stream is as far."""
        for i, host in self.leaving.items():
            self.hosts[i] = copies.wait_copy(host, self.values[i]), self.values[i].device
            self.values[i] = None
        self.leaving.clear()

    def begin_return(self) -> None:
        """Starts the copies back."""
        self.leave()
        for i, (host, device) in self.hosts.items():
            if i not in self.coming:
                self.coming[i] = copies.reload(host, device)

    def take(self) -> list[Any]:
        """The values on the device; this entry holds none of them any more."""
        self.begin_return()
        for i, x in self.coming.items():
            self.values[i] = copies.wait_copy(x, self.hosts[i][0])
        values, self.values = self.values, []
        self.hosts.clear()
        self.coming.clear()
        return values
