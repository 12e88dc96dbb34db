"""ALiBi without a bias for every pair: ``slopes * (j - i)`` becomes ``slopes * j``, [1, heads, 1, keys].

A softmax does not change when a row of scores is moved as a whole, so that the part of a bias that depends on the row
alone is left out. Where attention is causal, ``-slopes * |i - j|`` is the same bias. Source: Press et al. 2022, "Train
Short, Test Long".
"""

from __future__ import annotations

import math
from typing import Any

import torch.fx as fx

from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis import mask, positions
from mindspeed_fx.passes.fusion.analysis.bands import Distance

Given = tuple[str, fx.Node, fx.Node]
"""(kind, mask, where it is applied), as in :class:`mindspeed_fx.passes.fusion.analysis.attention_scores.Scores`."""


def apart(masks: list[Given]) -> list[Given]:
    """``masks`` with every bias by slopes by itself, where it was added to, or filled into, the rest of a mask
    before.
    """
    results: list[Given] = []
    for kind, n, where in masks:
        results += (
            _apart(n, where)
            if kind == "add" and mask.kept_band(n, kind) is None and _has_slopes(n)
            else [(kind, n, where)]
        )
    # Operators take one mask that is no band: a bias that was added to another such mask stays with it.
    return results if _others(results) <= max(1, _others(masks)) else masks


def _others(masks: list[Given]) -> int:
    return sum(mask.kept_band(n, kind) is None and positions.meaning(n) != 0 for kind, n, _ in masks)


def _apart(n: fx.Node, where: fx.Node) -> list[Given]:
    if _slopes(n) is None and match.operands(n, aten.add.Tensor) and all(match.is_float(a) for a in n.args):
        return [arg for a in n.args for arg in _apart(a, where)]
    if match.is_call(n, aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _hides(
        "drop", n.args[1], n.args[2], where
    ):
        return [*_apart(n.args[0], where), ("drop", n.args[1], where)]
    if match.is_call(n, aten.where.self, aten.where.ScalarOther) and _hides("keep", n.args[0], n.args[2], where):
        return [*_apart(n.args[1], where), ("keep", n.args[0], where)]
    return [("add", n, where)]


def _hides(kind: str, m: Any, number: Any, where: fx.Node) -> bool:
    """Whether scores to which ``number`` is added where the mask says so count for nothing beside others of their row.
    A finite one is added to all scores alike in a row that is hidden whole, whose weights it leaves as they are."""
    if not mask.blocks(number) or mask.fill(number) == -math.inf:
        return mask.blocks(number)
    return mask.keeps_own_key(kind, m, where)


def _has_slopes(n: Any, depth: int = 6) -> bool:
    if not depth or not match.is_float(n) or n.op != "call_function":
        return False
    return _slopes(n) is not None or any(_has_slopes(a, depth - 1) for a in n.all_input_nodes)


def _slopes(n: fx.Node) -> tuple[fx.Node, Distance] | None:
    """(slopes [..., heads, 1, 1], distance) when ``n`` is their product."""
    for slopes, distance in match.operands(n, aten.mul.Tensor):
        if (
            match.is_float(slopes)
            and match.value(slopes).dim() >= 3
            and all(statically_known_true(s == 1) for s in match.value(slopes).shape[-2:])
        ):
            result = positions.meaning(distance)
            if isinstance(result, Distance):
                return slopes, result
    return None
