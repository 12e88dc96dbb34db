"""Values that are compared with elements picked out of themselves: ``x == x.amax(-1, keepdim=True)``, as autograd's
gradient of ``amax`` asks, or ``x >= x.topk(k).values[..., -1:]``, as a filter of the best does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.op_sets import REARRANGEMENTS

aten = torch.ops.aten

COMPARISONS = tuple(getattr(aten, name).Tensor for name in ("eq", "ne", "lt", "le", "gt", "ge"))
PICKS = (
    *(aten.amax.default, aten.amin.default, aten.aminmax.default),
    *(aten.max.default, aten.min.default, aten.max.dim, aten.min.dim, aten.median.default, aten.median.dim),
    *(aten.topk.default, aten.sort.default, aten.sort.stable, aten.kthvalue.default, aten.mode.default),
    *(aten.cummax.default, aten.cummin.default, aten.gather.default, aten.index.Tensor, aten.index_select.default),
    *(aten.slice.Tensor, aten.select.int),
)
"""Operators whose first result is made of elements of their first argument."""

_MOVES = (*REARRANGEMENTS, aten.expand.default)
_NARROW = (torch.bfloat16, torch.float16)


def compared_with_their_own(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(comparison, value) of each value of 16 bits, computed in ``graph``, that is compared with an element of itself.

    Only such: to be equal, both sides must have been rounded alike.
    """
    for comparison in (n for target in COMPARISONS for n in graph.find_nodes(op="call_function", target=target)):
        sides = comparison.args[:2]
        if not all(isinstance(x, fx.Node) and match.value(x).dtype in _NARROW for x in sides):
            continue
        for one, other in (sides, sides[::-1]):
            value = _without(one, _MOVES)
            if value.op == "call_function" and _is_picked(other, value):
                yield comparison, value
                break


def _is_picked(n: fx.Node, value: fx.Node) -> bool:
    has_picked = False
    while n is not value:
        n = _without(n, _MOVES)
        if match.is_call(n, operator.getitem) and n.args[1] == 0:
            n = n.args[0]
        if n is value or not match.is_call(n, *PICKS):
            break
        n, has_picked = n.args[0], True
    return n is value and has_picked


def _without(n: fx.Node, calls: tuple) -> fx.Node:
    while match.is_call(n, *calls):
        n = n.args[0]
    return n
