"""Whether results are those of a reference, and by how much not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch.utils import _pytree as pytree

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest element of the truth, by type: two to three roundings of it, as the sums of the calls here need."""
OWN = 2.0
"""Times the error that the reference itself has in that type, where that is more."""


@dataclass(frozen=True)
class Comparison:
    """How far results are from the truth."""

    error: float
    """The largest error over the largest element of the truth, of the result that is nearest to its tolerance, or
    furthest beyond."""
    tolerance: float
    problem: str | None
    """What is wrong, with the number of the result; None: nothing."""


def compare(
    have: Sequence[Any], want: Sequence[Any], truth: Sequence[Any], dtype: torch.dtype = torch.float32
) -> Comparison:
    """Results against a reference's.

    Args:
        have: tensors, on any device; None where there is none.
        want: of the reference in the same types, on the processor: types and shapes, and how far rounding leads.
        truth: of the reference in float64, on the processor.
        dtype: the narrowest type of the arguments: wider results of narrow inputs are no better than those.
    """
    if len(have) != len(want):
        return Comparison(float("inf"), 0.0, f"{len(have)} results for {len(want)}")
    worst = Comparison(0.0, 0.0, None)
    for i, (h, w, t) in enumerate(zip(have, want, truth)):
        one = _one(h, w, t, dtype)
        if one.problem is not None:
            return Comparison(one.error, one.tolerance, f"result {i}: {one.problem}")
        if one.tolerance and one.error * worst.tolerance >= worst.error * one.tolerance:
            worst = one
    return worst


def _one(have: Any, want: Any, truth: Any, narrowest: torch.dtype) -> Comparison:
    if (have is None) != (want is None):
        return Comparison(float("inf"), 0.0, "missing" if have is None else "is there, the reference has none")
    if want is None:
        return Comparison(0.0, 0.0, None)
    if have.dtype != want.dtype or have.shape != want.shape:
        return Comparison(float("inf"), 0.0, f"{have.dtype} {tuple(have.shape)} for {want.dtype} {tuple(want.shape)}")
    have = have.detach().cpu()
    if not want.is_floating_point():
        wrong = (have != want).sum().item()
        return Comparison(float(wrong), 0.0, f"{wrong} of {want.numel()} elements differ" if wrong else None)
    if want.numel() == 0:
        return Comparison(0.0, 0.0, None)
    dtype = want.dtype
    have, want, truth = (x.detach().double().masked_fill(x.detach() == -torch.inf, 0.0) for x in (have, want, truth))
    if not have.isfinite().all() and want.isfinite().all():
        return Comparison(float("inf"), 0.0, f"{(~have.isfinite()).sum().item()} elements are not finite")
    scale = max(truth.abs().max().item(), 1e-30)
    error, own = ((x - truth).abs().max().item() / scale for x in (have, want))
    tolerance = max(OWN * own, TOLERANCE[dtype], TOLERANCE.get(narrowest, 0.0))
    beyond = f"off by {error:.2e} of the largest element; tolerance {tolerance:.2e}" if error > tolerance else None
    return Comparison(error, tolerance, beyond)


def flat(results: Any) -> list[Any]:
    """Results of an operator or a function, in order."""
    return [results] if isinstance(results, torch.Tensor) else list(pytree.tree_leaves(results))


def exact(values: Any) -> Any:
    """The same values in float64."""
    return pytree.tree_map(
        lambda v: (
            v.detach().double().requires_grad_(v.requires_grad)
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
        ),
        values,
    )
