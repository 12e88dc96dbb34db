"""A mask in the shape that operators take, wherever the model applies it."""

from __future__ import annotations

import math
from typing import Any

import torch.fx as fx

from mindspeed_fx.compat.symbols import are_known_equal
from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten


def four_dimensional(gm: fx.GraphModule, before: fx.Node, m: fx.Node, where: fx.Node, lead: list[Any]) -> fx.Node:
    """The mask as it broadcasts to [batch, heads, q_seq, kv_seq]; ``where`` it is applied, batch and heads may be one,
    or more than two (Swin's windows).
    """
    outer, own = list(match.value(where).shape[:-2]), list(match.value(m).shape)
    own = [1] * (len(outer) + 2 - len(own)) + own
    groups = next((g for i in range(len(outer) + 1) if _sizes(g := (outer[:i], outer[i:]), lead)), None)
    if groups is None:  # other batches and heads: as it is applied
        known = _are_ones(own[:-2])
        wanted, shape = (own, [1, 1]) if known else ([*outer, *own[-2:]], lead)
    else:
        wanted, shape, start = [], [], 0
        for group in groups:
            part = own[start : (start := start + len(group))]
            alike = _are_ones(part)
            wanted += part if alike else group
            shape.append(1 if alike else math.prod(group))
        wanted += own[-2:]
    for target, sizes in ((aten.expand.default, wanted), (aten.reshape.default, [*shape, *own[-2:]])):
        if not are_known_equal(match.value(m).shape, sizes):
            m = rewrite.insert(gm, before, target, (m, sizes))
    return m


def _are_ones(sizes: list[Any]) -> bool:
    return are_known_equal(sizes, [1] * len(sizes))


def _sizes(groups: tuple[list[Any], list[Any]], lead: list[Any]) -> bool:
    return are_known_equal([math.prod(g) for g in groups], lead)
