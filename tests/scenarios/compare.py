"""Whether what a backend computed is what eager PyTorch computed."""

from __future__ import annotations

import torch

TOLERANCES = {torch.float64: 2e-6, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest difference over the largest value of a tensor. Rounding of some thousand operations; float64 has that of the
float32 parts that models keep in it (norms, rotations, softmax)."""

SMALLEST = 1e-3
"""Part of the largest value of its group (the losses, the gradients) that a tensor counts as having at least: the
gradient of a bias of attention's keys is zero but for rounding."""


def difference(ours: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]) -> tuple[float, str]:
    """(the largest difference in units of the tolerance, where it is): at most 1 is equal; infinite where a tensor is
    missing, has another shape or dtype, or is not a number in one alone."""
    if missing := sorted(ours.keys() ^ eager.keys()):
        return float("inf"), f"{missing[0]} in one alone, of {len(missing)}"
    if not eager:
        return float("inf"), "nothing to compare"
    largest: dict[str, float] = {}
    for name, value in eager.items():
        group = name.split(".")[0]
        largest[group] = max(largest.get(group, 0.0), largest_of(value))
    offs = ((_off(ours[n], eager[n], SMALLEST * largest[n.split(".")[0]]), n) for n in eager)
    return max(offs, key=lambda pair: pair[0])


def largest_of(value: torch.Tensor) -> float:
    """The largest finite absolute value."""
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    finite = value[value.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def _off(ours: torch.Tensor, eager: torch.Tensor, least: float) -> float:
    if ours.shape != eager.shape or ours.dtype != eager.dtype:
        return float("inf")
    if eager.numel() == 0:
        return 0.0
    if not (eager.is_floating_point() or eager.is_complex()):
        return 0.0 if torch.equal(ours, eager) else float("inf")
    real = eager.real.dtype if eager.is_complex() else eager.dtype
    wide = torch.complex128 if eager.is_complex() else torch.float64
    ours, eager = ours.to(wide), eager.to(wide)
    finite = eager.isfinite()
    if not torch.equal(finite, ours.isfinite()) or not torch.equal(eager.isnan(), ours.isnan()):
        return float("inf")
    if not finite.any():
        return 0.0
    off = (ours[finite] - eager[finite]).abs().max().item()
    scale = max(eager[finite].abs().max().item(), least, 1e-6)
    return off / scale / TOLERANCES.get(real, 0.2)
