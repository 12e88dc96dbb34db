"""Where the heads of attention come from: keys and values before they are repeated for grouped-query attention.

A tensor [batch, heads, seq, dim] is followed back through views, transposes and permutes to the repetition of its
heads. Each dimension carries the labels of the original dimensions merged in it, so that only a chain that ends as
(batch, kv_heads x repeats, seq, dim) in that order is accepted.
"""

from __future__ import annotations

from typing import Any, Callable

import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall

Labels = list[tuple[tuple[str, Any], ...]]  # per dimension: the (label, size) pairs merged in it


def ungroup(before: fx.Node, n: fx.Node, heads: Any) -> fx.Node | NewCall | None:
    """[batch, kv_heads, seq, dim] that ``n`` [batch, heads, seq, dim] repeats head by head; None when it does not."""
    chain: list[fx.Node] = []
    while n.op == "call_function":
        result = repetition(n)
        if result is not None:
            source, axis, times = result
            order = _order(source, axis, times, chain, heads)
            if order in (None, [0, 1, 2, 3]):
                return None if order is None else source
            return NewCall(before, aten.permute.default, source, order)
        if not match.is_call(
            n, aten.transpose.int, aten.permute.default, aten.contiguous.default, aten.clone.default, *match.RESHAPES
        ):
            return None
        chain.append(n)
        n = n.args[0]
    return None


def repetition(n: fx.Node) -> tuple[fx.Node, int, int] | None:
    """(source, axis, times) when ``n`` repeats each element of one axis of a 4-dimensional ``source``."""
    if match.is_call(n, aten.repeat_interleave.self_int):
        dim = match.argument(n, "dim")
        if isinstance(dim, int) and isinstance(n.args[1], int) and match.value(n.args[0]).dim() == 4:
            return n.args[0], dim % 4, n.args[1]
    if match.is_call(n, *match.RESHAPES, aten.clone.default) and match.is_call(n.args[0], aten.expand.default):
        wide = n.args[0].args[0]
        if match.is_call(wide, aten.unsqueeze.default) and match.value(wide.args[0]).dim() == 4:
            source, axis = wide.args[0], wide.args[1] % 5 - 1
            times = match.value(n.args[0]).shape[axis + 1]
            shape = list(match.value(source).shape)
            if axis >= 0 and isinstance(times, int):
                shape[axis] = shape[axis] * times
                return (source, axis, times) if list(match.value(n).shape) == shape else None
    return None


def _order(source: fx.Node, axis: int, times: int, chain: list[fx.Node], heads: Any) -> list[int] | None:
    """How to permute ``source`` to [batch, kv_heads, seq, dim], read off the labels at the end of ``chain``."""
    shape = list(match.value(source).shape)
    labels: Labels = [((str(d), size),) for d, size in enumerate(shape)]
    labels[axis] = ((f"{axis}", shape[axis] * times),)
    for node in reversed(chain):
        moved = _move(node, labels)
        if moved is None:
            return None
        labels = moved
    if len(labels) != 4 or any(len(merged) != 1 for merged in labels) or labels[1] != ((f"{axis}", heads),):
        return None
    return [int(merged[0][0]) for merged in labels]


def _move(node: fx.Node, labels: Labels) -> Labels | None:
    if match.is_call(node, aten.contiguous.default, aten.clone.default):
        return labels
    if match.is_call(node, aten.transpose.int):
        labels, (a, b) = list(labels), node.args[1:]
        labels[a], labels[b] = labels[b], labels[a]
        return labels
    if match.is_call(node, aten.permute.default):
        return [labels[d] for d in node.args[1]]
    return _regroup([pair for merged in labels for pair in merged], list(match.value(node).shape))


def _regroup(pairs: list[tuple[str, Any]], shape: list[Any]) -> Labels | None:
    """Deal the dimensions out again over ``shape``, each new one taking whole old ones."""
    result: Labels = []
    pairs = list(pairs)
    for size in shape:
        taken, product = [], 1
        while product != size:
            if not pairs:
                return None
            taken.append(pairs[0])
            product = product * pairs.pop(0)[1]
        result.append(tuple(taken))
    return result if not pairs or all(isinstance(s, int) and s == 1 for _, s in pairs) else None


def source_of(n: fx.Node, *targets: Callable) -> fx.Node:
    """``n`` without the given calls around it."""
    while match.is_call(n, *targets):
        n = n.args[0]
    return n
