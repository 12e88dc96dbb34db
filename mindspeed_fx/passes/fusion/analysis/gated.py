"""What SwiGLU and the other gated linear units share: the product ``activation(gate) * up`` becomes one operator."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.passes.fusion.analysis import algebra


class _Activated(NamedTuple):
    gate: fx.Node
    further: tuple
    number: float
    over: list[fx.Node]
    under: list[fx.Node]
    """What else is in the product, one number for each row."""
    nodes: list[fx.Node]


def _match_activation(n: Any, activation_of: Callable) -> _Activated | None:
    """``n`` as an activated gate times numbers."""
    if not match.is_float(n):
        return None
    result = activation_of(match.uncast(n))
    if result is not None:
        return _Activated(*result, 1.0, [], [], [n, match.uncast(n)])
    flat = algebra.product(n)
    for at, leaf in enumerate(flat.over if flat.nodes else ()):
        result, rest = activation_of(match.uncast(leaf)), [*flat.over[:at], *flat.over[at + 1 :]]
        if result is not None and all(
            match.is_float(r) and match.is_column(r, result[0]) for r in (*rest, *flat.under)
        ):
            return _Activated(*result, flat.number, rest, flat.under, [*flat.nodes, leaf, match.uncast(leaf)])
    return None


def packed_source(gate: fx.Node, up: fx.Node) -> fx.Node | None:
    """The tensor whose halves are [gate | up], if there is one."""
    a, b = match.part(gate), match.part(up)
    if (
        a
        and b
        and match.same(a.source, b.source)
        and a.step == b.step == 1
        and a.dim == b.dim == match.value(a.source).dim() - 1
    ):
        if (
            a.start == 0
            and a.stop == b.start
            and b.stop == match.value(a.source).shape[-1]
            and a.stop == b.stop - b.start
        ):
            return a.source
    return None
