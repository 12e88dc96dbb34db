"""Where checks run, and how tensors get there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mindspeed_fx.planning.calibrate.timing import synchronize


@dataclass(frozen=True)
class Place:
    """A device, and the target whose kernels run on it."""

    target: str
    """"cpu", "cuda" or "npu"."""
    device: torch.device
    hardware: str | None
    """The cost model's table; None: none is known for the device."""
    is_emulated: bool = False
    """The target's graphs run on the processor: torch_npu's calls by their documented formulas, Triton's kernels by
    their references, or interpreted where TRITON_INTERPRET=1."""

    @property
    def codegen(self) -> str:
        """How fusions are compiled: as models are by default there; emulated calls stay calls."""
        return "eager" if self.is_emulated or self.target == "npu" else "inductor"

    def send(self, values: Any) -> Any:
        """``values`` with their tensors on the device, each with its strides."""
        return pytree.tree_map(lambda v: self._tensor(v) if isinstance(v, torch.Tensor) else v, values)

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        if x.device == self.device:
            return x
        own = x.detach()
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
            own = own.narrow(dim, 0, 1) if stride == 0 and size > 1 else own
        there = torch.empty_strided(own.shape, own.stride(), dtype=x.dtype, device=self.device).copy_(own)
        return there.expand(x.shape).requires_grad_(x.requires_grad)

    def wait(self) -> None:
        """Until all that was given to the device is done, so that an error belongs to the check that made it."""
        synchronize(self.device)
