"""Rewrites of Inductor's own that are wrong: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def keep_dtype_of_running_sums() -> None:
    """Inductor (2.11, 2.13) counts in place of a running sum of a constant, in the constant's dtype, or in int64
    where that is an integer's, whatever dtype the sum was asked for. What reads it in the same graph rounds as if
    nothing were wrong; a caller gets another dtype, and a backward that was compiled for float32 reads the bits of
    integers. Then the sum stays a sum.
    """
    from torch._inductor.fx_passes import post_grad

    for stage in post_grad.pass_patterns:
        for entry in stage.patterns.get(("call_function", torch.ops.aten.cumsum.default), ()):
            if getattr(getattr(entry, "handler", None), "__name__", "") == "pointless_cumsum_replacement":
                entry.extra_check = _gives_its_dtype


def _gives_its_dtype(match: Any) -> bool:
    constant = match.kwargs["dtype"]
    counted = constant if constant.is_floating_point or constant.is_complex else torch.int64
    return match.output_node().meta["val"].dtype == counted
