"""What a training step costs beside its kernels and messages: constants of a device's software, fitted to published
runs.

:data:`FITTED` has one record for each kind of device. The fits and what they are fitted to: docs/cost.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

from mindspeed_fx.cost.device import Constant as C


@dataclass(frozen=True)
class TrainingConstants:
    """Seconds and shares."""

    host: C
    """Seconds in which the host launches a kernel."""
    contention: C
    """Share of a hidden message by which the kernels over it get slower."""
    exposed_sends: C
    """Share of the messages between stages that is waited for."""
    imbalance: C
    """Tokens of the fullest expert's rank over the average."""
    permutation: C
    """Time of sorting tokens by expert and of the router over that of moving the same bytes."""
    early_attention: C
    """Time of FlashAttention 1 in Triton over that of the vendor's current kernel."""
    microbatch: C
    """Seconds of a microbatch that are no kernel: schedule, data."""
    step: C
    """Seconds of a step that are no kernel: logging, loss scale, data."""
    framework: Mapping[str, C] = field(default_factory=dict)
    """Time of a microbatch relative to Megatron-core."""


_P = "prior"
PRIOR = TrainingConstants(
    C(12e-6, "s", _P, "low"),
    C(0.15, "", _P, "low"),
    C(1.0, "", _P, "low"),
    C(1.15, "", _P, "low"),
    C(1.5, "", _P, "low"),
    C(2.0, "", _P, "low"),
    C(2e-3, "s", _P, "low"),
    C(0.05, "s", _P, "low"),
)
