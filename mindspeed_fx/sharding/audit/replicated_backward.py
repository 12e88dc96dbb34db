"""Whether a backward computes whole what the forward divides: read off the joint graph of one rank, operator by
operator.

What an operator's gradient reads and makes is what the operator read and made, or their gradients: no tensor of it is
larger than those of the forward have here. Where one is, by the ranks of a mesh dimension or more, the gradient was
made whole before and every rank computes it alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake, tracing
from mindspeed_fx.graph.op_sets import is_view, name


class Grown(NamedTuple):
    """A node of the backward that works on more than its operator did in the forward."""

    node: fx.Node
    times: float


MOVED_OR_FILLED = frozenset("clone cat zeros zeros_like full empty new_zeros new_empty".split())
"""Operators that compute nothing, beside views: what follows a gather, and what a collective is fed."""


def grown(gm: fx.GraphModule, forward: set[fx.Node], ranks: int) -> tuple[list[Grown], int]:
    """Nodes of the backward with a tensor ``ranks`` times as large as any that their operator had in the forward, and
    how many were compared.

    Args:
        gm: a joint graph whose nodes know the call of autograd that they belong to.
        forward: its nodes that results need.
        ranks: the smallest of the mesh's dimensions that have more than one rank.
    """
    largest: dict[int, int] = {}
    later = []
    for n in gm.graph.nodes:
        number = tracing.autograd_number(n)
        if n.op != "call_function" or number is None:
            continue
        if n in forward:
            largest[number] = max(largest.get(number, 0), _size(n))
        elif _computes(n):
            later.append((number, n))
    known = [(n, _size(n), largest[number]) for number, n in later if largest.get(number)]
    return [Grown(n, size / had) for n, size, had in known if size >= ranks * had], len(known)


def _computes(n: fx.Node) -> bool:
    target: Any = n.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "mindspeed")
        and not is_view(target)
        and name(target) not in MOVED_OR_FILLED
    )


def _size(n: fx.Node) -> int:
    """Elements of the largest tensor that ``n`` reads or makes."""
    values = [a.meta.get("val") for a in (n, *n.all_input_nodes)]
    leaves = [t for v in values for t in (v if isinstance(v, (tuple, list)) else (v,)) if isinstance(t, torch.Tensor)]
    return max((fake.hint(t.numel()) for t in leaves), default=0)
