"""What is measured: a function of tensors, forward and backward, and who else computes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable

import torch

Function = Callable[..., Any]
LATE = "failed: not compiled in the time for it"


class Late(BaseException):
    """The time for compiling is over; nothing that a compiler catches."""


@dataclass(frozen=True)
class Problem:
    """One function of tensors at one size."""

    define: Function
    """The function in plain torch, of ``leaves`` and ``others``; what eager PyTorch, Inductor and we are given."""
    leaves: list[torch.Tensor]
    """Floating-point tensors that gradients are wanted of."""
    others: list[torch.Tensor] = field(default_factory=list)
    moved: tuple[int, int] = (0, 0)
    """Bytes that must move forward and backward: every input read once, every result written once."""
    flop: tuple[int, int] = (0, 0)
    """Operations of matrix products forward and backward."""
    rivals: dict[str, Function] = field(default_factory=dict)
    """Rival -> the same function by its kernels; a package that is not installed has no key."""
    options: dict[str, Any] = field(default_factory=dict)
    """Ours, where the pass is off by default."""
    without: tuple[str, ...] = ()
    """Of eager and inductor, those that take minutes or do not compile."""
    exact: torch.dtype = torch.float64
    """The type of the reference, where some operator has no float64."""


def size(*tensors: torch.Tensor) -> int:
    """Bytes of the tensors together."""
    return sum(x.numel() * x.element_size() for x in tensors)


def optional(module: str, attribute: str) -> Any:
    """``module.attribute``, or None where the package is not installed."""
    try:
        return getattr(__import__(module, fromlist=[attribute]), attribute)
    except ImportError:
        return None


def present(**rivals: Function | None) -> dict[str, Function]:
    return {name: run for name, run in rivals.items() if run is not None}


def new(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=device).to(dtype)
