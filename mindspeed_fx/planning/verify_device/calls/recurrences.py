"""Calls of operators that go through a sequence with a state, or through many turns."""

from __future__ import annotations

import itertools
from typing import Iterator

import torch

from mindspeed_fx.planning.verify_device.calls.makers import BNSD, BSND, normal, stored
from mindspeed_fx.planning.verify_device.calls.table import Call

ops = torch.ops.mindspeed


def recurrence_cases(dtype: torch.dtype) -> Iterator[Call]:
    yield from _delta_rules(dtype)
    yield from _rules_by_channel(dtype)
    yield from _state_spaces(dtype)
    yield from _scans(dtype)
    yield from _turns(dtype)


def _delta_rules(dtype: torch.dtype) -> Iterator[Call]:
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
            _DELTA_RULES[0],
        )
        out, final, starts = ops.gated_delta_rule(*arguments)
        yield (
            f"gated_delta_rule_backward-{name}",
            ops.gated_delta_rule_backward,
            (torch.randn_like(out), torch.randn_like(final), starts, *arguments),
            _DELTA_RULES[1],
        )


def _rules_by_channel(dtype: torch.dtype) -> Iterator[Call]:
    """With and without a first state and normalized keys, both layouts; in 16 bits alone."""
    if dtype.itemsize != 2:
        return
    for whole, turned in itertools.product((False, True), repeat=2):
        order = BSND if turned else BNSD
        q, k, v, g = (stored((1, 2, 9, n), order, dtype) for n in (8, 8, 6, 8))
        state, eps = (torch.randn(1, 2, 8, 6), 1e-6) if whole else (None, None)
        arguments = q, k, v, -g.abs(), torch.rand(1, 2, 9).to(dtype), state, 8**-0.5, eps
        yield from _there_and_back("kimi_delta_attention", f"{whole}-{turned}", arguments, _DELTA_RULES)


def _state_spaces(dtype: torch.dtype) -> Iterator[Call]:
    """With and without a skip and a first state, heads that share columns or have their own; in 16 bits alone."""
    if dtype.itemsize != 2:
        return
    for whole, shared in itertools.product((False, True), repeat=2):
        x, dt = normal(1, 9, 4, 6, dtype=dtype), torch.rand(1, 9, 4).to(dtype)
        columns = [normal(1, 9, 1 if shared else 4, 8, dtype=dtype) for _ in range(2)]
        skip, state = (torch.randn(4), torch.randn(1, 4, 6, 8)) if whole else (None, None)
        arguments = x, dt, -torch.rand(4), *columns, skip, state, 8
        yield from _there_and_back("ssd", f"{whole}-{shared}", arguments, _SPACES)


def _scans(dtype: torch.dtype) -> Iterator[Call]:
    """With and without a skip, a gate, a bias, a softplus and a first state, both layouts."""
    for whole, turned in itertools.product((False, True), repeat=2):
        u, dt, z, b, c = (
            normal(1, 9, n, dtype=dtype).transpose(1, 2) if turned else normal(1, n, 9, dtype=dtype)
            for n in (6, 6, 6, 4, 4)
        )
        rest = (torch.randn(6), z, torch.randn(6), torch.randn(1, 6, 4)) if whole else (None,) * 4
        arguments = u, dt if whole else dt.sigmoid(), -torch.rand(6, 4), b, c, *rest, whole
        yield from _there_and_back("selective_scan", f"{whole}-{turned}", arguments, _SCANS)


def _turns(dtype: torch.dtype) -> Iterator[Call]:
    x = normal(2, 5, 4, 4, dtype=dtype)
    yield "sinkhorn_knopp", ops.sinkhorn_knopp, (x, 3, 1e-6), "triton, all turns on chip"
    back = "triton, all turns on chip, then back"
    yield "sinkhorn_knopp_backward", ops.sinkhorn_knopp_backward, (torch.randn_like(x), x, 3, 1e-6), back


_DELTA_RULES = (
    "triton, triangular systems of all tiles, then a walk through the states",
    "triton, states again, a walk back, then all tiles at once",
)
_SPACES = "triton, a walk through the states of each head", "triton, states again, a walk back, then all tiles at once"
_SCANS = (
    "triton, walks through segments with the states of some channels",
    "triton, a walk back, the states of a chunk again",
)


def _there_and_back(name: str, case: str, arguments: tuple, kernels: tuple[str, str]) -> Iterator[Call]:
    forward, backward = getattr(ops, name), getattr(ops, f"{name}_backward")
    yield f"{name}-{case}", forward, arguments, kernels[0]
    out, final, starts = forward(*arguments)
    gradients = torch.randn_like(out), torch.randn_like(final)
    yield f"{name}_backward-{case}", backward, (*gradients, starts, *arguments), kernels[1]
