"""Calls of the gated delta rule."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import BNSD, BSND, stored
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def recurrence_cases(dtype: torch.dtype) -> Iterator[Call]:
    """With and without gates, a first state and normalized keys, heads of their own and shared keys, both layouts; the
    kernels take 16 bits alone.
    """
    if dtype.itemsize != 2:
        return
    for gated, begun, shared in itertools.product((False, True), repeat=3):
        order = BSND if shared else BNSD
        q, k = (stored((1, 1 if shared else 2, 9, 8), order, dtype) for _ in range(2))
        v, beta = stored((1, 2, 9, 6), order, dtype), torch.rand(1, 2, 9).to(dtype)
        g = -torch.rand(1, 2, 9) if gated else None
        state = torch.randn(1, 2, 8, 6) if begun else None
        settings = 8**-0.5, 1e-6 if shared else None, 8
        arguments = q, k, v, g, beta, state, *settings
        name = f"{gated}-{begun}-{shared}"
        yield (
            f"gated_delta_rule-{name}",
            ops.gated_delta_rule,
            arguments,
            "triton, triangular systems of all tiles, then a walk through the states",
        )
        out, final, starts = ops.gated_delta_rule(*arguments)
        yield (
            f"gated_delta_rule_backward-{name}",
            ops.gated_delta_rule_backward,
            (torch.randn_like(out), torch.randn_like(final), starts, *arguments),
            "triton, states again, a walk back, then all tiles at once",
        )
