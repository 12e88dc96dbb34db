"""What a training step costs beside its kernels and messages: constants of a device's software, fitted to published
runs.

:data:`FITTED` has one record for each kind of device. The fits and what they are fitted to: docs/cost.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Mapping

from mindspeed_fx.cost.device import Constant as C
from mindspeed_fx.cost.device import Hardware, fitted_constant


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


def _record(source: str, framework: dict[str, tuple[float, float]], **values: tuple[float, float]) -> TrainingConstants:
    """``values``: name -> value and relative spread."""

    def constant(value: float, spread: float, unit: str = "") -> C:
        return fitted_constant(value, unit, source, spread)

    seconds = ("host", "microbatch", "step")
    fields = {name: constant(*pair, unit="s" if name in seconds else "") for name, pair in values.items()}
    return TrainingConstants(**fields, framework={name: constant(*pair) for name, pair in framework.items()})


PRIOR = _record(
    "assumed: what fits start from",
    {},
    host=(12e-6, 0.4),
    contention=(0.15, 0.6),
    exposed_sends=(1.0, 0.3),
    imbalance=(1.15, 0.1),
    permutation=(1.5, 0.5),
    early_attention=(2.0, 0.3),
    microbatch=(2e-3, 1.0),
    step=(0.05, 1.0),
)
FITTED = {
    "ascend": _record(
        "fit to 169 published runs and 19 kernels on 910B (benchmarks/fit_runs.py)",
        {"legacy": (1.062, 0.02), "mindspore": (1.046, 0.02)},
        host=(12e-6, 0.40),
        contention=(0.498, 0.12),
        exposed_sends=(0.996, 0.29),
        imbalance=(1.186, 0.09),
        permutation=(3.79, 0.26),
        early_attention=(2.0, 0.3),
        microbatch=(4.31e-3, 0.66),
        step=(0.0250, 0.51),
    ),
    "h100": _record(
        "fit to 89 published runs and 7 kernels on H100 (benchmarks/fit_runs.py)",
        {"fsdp": (1.024, 0.04)},
        host=(8e-6, 0.40),
        contention=(0.772, 0.19),
        exposed_sends=(1.0, 0.3),
        imbalance=(1.099, 0.08),
        permutation=(1.059, 0.41),
        early_attention=(2.586, 0.14),
        microbatch=(2.53e-3, 0.98),
        step=(0.0320, 0.66),
    ),
    "a100": _record(
        "fit to 188 published runs on A100 (benchmarks/fit_runs.py)",
        {"fsdp": (0.969, 0.06)},
        host=(8e-6, 0.40),
        contention=(0.192, 0.59),
        exposed_sends=(1.0, 0.3),
        imbalance=(1.15, 0.10),
        permutation=(1.5, 0.50),
        early_attention=(1.354, 0.16),
        microbatch=(2.1e-3, 1.00),
        step=(0.0359, 0.48),
    ),
}
ERRORS = {
    "ascend": {"dense": 0.13, "small": 0.10, "experts": 0.49},
    "h100": {"dense": 0.09, "small": 0.09, "experts": 0.21},
    "a100": {"dense": 0.09, "small": 0.09, "experts": 0.21},
}
"""Group of devices -> class of runs -> what the logarithm of published over modelled seconds is within for four of five
runs, their family left out of the fits (benchmarks/results): on 910B 106 dense runs, 16 small ones and 4 with experts,
on H100 29, 46 and 12. H100's small runs are of one family, so that its dense ones' error stands for them; A100 has one
family and H100's errors."""
UNFITTED = 0.61
"""The same for devices by data sheet alone: the widest above and a quarter more. Assumed."""


def group_of(hw: Hardware) -> str:
    """The group of devices that share software constants; "" for those that no run stands for."""
    if hw.target == "npu":
        return "ascend"
    return "" if hw.target != "cuda" else "a100" if hw.name.startswith("a100") else "h100"


def training_constants(hw: Hardware) -> TrainingConstants:
    """The constants of the software on ``hw``."""
    return FITTED.get(group_of(hw), PRIOR)


def interval_of(hw: Hardware, kind: str) -> tuple[float, float]:
    """Factors of a modelled time between which four of five runs are.

    Args:
        kind: "dense", "small" or "experts".
    """
    known = ERRORS.get(group_of(hw), {}) if hw.fitted else {}
    error = known.get(kind, UNFITTED)
    return math.exp(-error), math.exp(error)


def modelled_step(hw: Hardware, seconds: float, unit: float = 1e3, name: str = "ms", kind: str = "dense") -> str:
    """A modelled time of a step as every page shows it: with the interval that :func:`interval_of` gives."""
    low, high = (seconds * factor * unit for factor in interval_of(hw, kind))
    return f"{seconds * unit:,.4g} {name} ({low:,.3g} to {high:,.3g})"
