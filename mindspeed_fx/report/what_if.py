"""What the step would be with other options or another batch, by the cost model: plain records, which
:mod:`mindspeed_fx.planning.what_if` fills."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variant:
    """The step modelled in one form; sums over all graphs of the model."""

    kind: str
    """"base": as it is; "level", "without" (a family of rewrites) or "batch"."""
    value: str
    """"1", "norms", "8"; of the base the batch."""
    seconds: float = 0.0
    """Modelled, forward and backward, collectives overlapped as the graphs have them."""
    kernels: int = 0
    bytes: int = 0
    """Read and written."""
    peak: int = 0
    """Bytes of results alive at once, gradients among them."""
    resident: int = 0
    """Bytes of parameters, buffers and inputs."""
    rewrites: int = 0
    error: str = ""
    """Why it could not be modelled; "" where it was."""

    @property
    def name(self) -> str:
        return "as it is" if self.kind == "base" else f"{self.kind} {self.value}"


@dataclass
class WhatIf:
    """The step as it is and in other forms."""

    base: Variant
    variants: list[Variant] = field(default_factory=list)
    batch: int = 0
    """First dimension of the inputs; 0 where they have none."""
    note: str = ""
    """What was modelled otherwise than the model runs."""
