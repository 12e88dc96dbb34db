"""How far rounding may take a program's values, to first order: a stated model, sampled.

Floating-point operator j computes ``f_j(x (1 + d)) (1 + d')`` with every ``d`` at most the unit of its type (Higham,
"Accuracy and Stability of Numerical Algorithms", 2.2 and 3.1: backward error of sums and products). Numbers that
operators read are therefore moved by a part of at most that unit, each element of each argument of each operator, of
the forward and of the backward, on its own. In a sum of n each term takes part in up to n roundings, those of 16-bit
numbers in float32, and is moved by n units more: for numbers x alike a standard deviation of n^1.5 u x / sqrt(3), which
is that of a running sum, where the i-th of n roundings is one of i x. A sum of numbers that cancel is moved by its
terms and not by what is left of them, and what is divided by a difference close to zero by all that it was computed
from. The other operators are exact (float64), so that what a run differs by from the exact one is one sample of the
error of the program (Parker, "Monte Carlo Arithmetic", 1997). Each sample has mean zero to first order; the standard
deviation of every element is taken from :data:`SAMPLES` of them, and an error over ``FACTOR`` (8) of them is, by
Student's distribution of that many degrees of freedom, one that rounding makes once in two million elements.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES = 16

EXACT = frozenset("clone _unsafe_view cat stack".split())
"""Operators that compute nothing, beside views."""

PRODUCTS = frozenset("mm bmm addmm baddbmm mv addmv dot".split())
SUMS = frozenset("sum mean cumsum _softmax _log_softmax _softmax_backward_data logsumexp var std norm prod".split())
"""Operators that add up numbers, along rows of their first matrix or along the dimensions that they are told."""

WIDE = torch.float64


class Widened(TorchDispatchMode):
    """A program of float64 stays in it: casts to narrower types, those of autocast too, are left out. What a program
    rounds by itself is then part of what eager PyTorch is off, overflow and underflow included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if (dtype := kwargs.get("dtype")) is not None and dtype.is_floating_point:
            kwargs["dtype"] = WIDE
        args = tuple(WIDE if isinstance(a, torch.dtype) and a.is_floating_point else a for a in args)
        return func(*args, **kwargs)


class Rounded(TorchDispatchMode):
    """Every element that an operator reads is moved by a part of at most ``unit``."""

    def __init__(self, unit: float, seed: int):
        super().__init__()
        self.unit, self.generator = unit, torch.Generator("cpu").manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._opname not in EXACT:
            reads = zip(func._schema.arguments, args)
            unit = self.unit + (terms_added(func._opname, args) - 1) * min(self.unit, 2.0**-24)
            moved = [a if schema.alias_info else self._moved(a, unit) for schema, a in reads]  # writes and views stay
            args = (*moved, *args[len(moved) :])
        return func(*args, **(kwargs or {}))

    def _moved(self, argument: Any, unit: float) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda x: self._of_tensor(x, unit), argument)

    def _of_tensor(self, x: torch.Tensor, unit: float) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        part = 2 * torch.rand(x.shape, generator=self.generator, dtype=torch.float64, device="cpu") - 1
        return x * (1 + unit * part).to(x)


def terms_added(name: str, args: tuple) -> int:
    """How many numbers the operator adds up for one of its results."""
    if name in PRODUCTS:
        return max(args[name.startswith(("add", "badd"))].shape[-1], 1)
    if name not in SUMS:
        return 1
    x = args[0]
    dims = next((a for a in args[1:] if isinstance(a, (int, list, tuple))), None)
    dims = [dims] if isinstance(dims, int) else dims
    return max(math.prod(x.shape[d] for d in (dims if dims else range(x.dim()))), 1) if x.dim() else 1


def deviations(run: Callable[[], dict[str, Any]], exact: dict[str, Any], unit: float) -> dict[str, torch.Tensor]:
    """Tensor of a program -> the standard deviation of each of its elements under rounding, float64.

    Args:
        run: the program, in float64.
        exact: what it returns undisturbed.
        unit: relative rounding error of the coarsest type that it computes in.
    """
    sums: dict[str, torch.Tensor] = {}
    for seed in range(SAMPLES):
        with Rounded(unit, seed):
            results = run()
        for name, value in results.items():
            true = exact[name]
            if value is not None and true is not None and value.is_floating_point() and value.shape == true.shape:
                sums[name] = sums.get(name, 0.0) + (value.double() - true.double()).square()
    return {name: (total / SAMPLES).sqrt() for name, total in sums.items()}
