"""Values that are compared with elements picked out of themselves: ``x == x.amax(-1, keepdim=True)``, as autograd's
gradient of ``amax`` asks, or ``x >= x.topk(k).values[..., -1:]``, as a filter of the best does.
"""

from __future__ import annotations

import operator

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


def compared_with_their_own(graph: fx.Graph) -> list[fx.Node]:
    """The values of 16 bits, computed in ``graph``, that are compared with elements of themselves: to be equal, both
    sides must have been rounded alike.
    """
    results: dict[fx.Node, None] = {}
    for comparison in (n for target in COMPARISONS for n in graph.find_nodes(op="call_function", target=target)):
        sides = comparison.args[:2]
        if not all(isinstance(x, fx.Node) and getattr(x.meta.get("val"), "dtype", None) in _NARROW for x in sides):
            continue
        for one, other in (sides, sides[::-1]):
            value = _without(one, _MOVES)
            if value.op == "call_function" and (whole := _picked_from(other, value)):
                results |= dict.fromkeys((value, whole))
                break
    return list(results)


def _picked_from(n: fx.Node, value: fx.Node) -> fx.Node | None:
    """What ``n`` is elements of: ``value``, or the same call elsewhere; None where it is not."""
    has_picked = False
    while not _is_same(n, value):
        n = _without(n, _MOVES)
        if match.is_call(n, operator.getitem) and n.args[1] == 0:
            n = n.args[0]
        if _is_same(n, value) or not match.is_call(n, *PICKS):
            break
        n, has_picked = n.args[0], True
    return n if has_picked and _is_same(n, value) else None


def _is_same(n: fx.Node, value: fx.Node) -> bool:
    """The node itself, or the same call of the same nodes: autograd takes |x| anew for the gradient of its greatest."""
    calls = n.op == value.op == "call_function" and n.target is value.target
    return n is value or (calls and n.args == value.args and n.kwargs == value.kwargs)


def _without(n: fx.Node, calls: tuple) -> fx.Node:
    while match.is_call(n, *calls):
        n = n.args[0]
    return n
