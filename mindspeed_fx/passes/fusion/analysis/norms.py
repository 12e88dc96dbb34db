"""What the norms share: a value divided by its root mean square or deviation, and the weights around it."""

from __future__ import annotations

import math
from typing import Callable, Iterator, NamedTuple, Sequence

import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis import algebra, moments


class Normal(NamedTuple):
    """number * x / sqrt(m + eps) times other factors; m is what ``spread`` says, without its scale."""

    x: fx.Node
    spread: moments.RootMoment
    eps: float
    number: float
    over: list[fx.Node]
    under: list[fx.Node]
    nodes: list[fx.Node]


def normal(
    node: fx.Node, is_x: Callable[[fx.Node, moments.RootMoment], bool], skipped_nodes: Sequence[fx.Node] = ()
) -> Normal | None:
    """``node`` as a value that ``is_x`` divided by a root that belongs to it, in any association and spelling of the
    root.

    The nodes of ``skipped_nodes`` are not looked into.
    """
    flat = algebra.product(node, skipped_nodes)
    for root, result in roots(flat):
        for x in [*flat.over, *flat.nodes[1:]]:
            if x is root or not match.is_float(x) or not moments.keeps(root, x, result.dims) or not is_x(x, result):
                continue
            parts = algebra.product(node, [x, *skipped_nodes])
            over, under = [n for n in parts.over if n is not root], [n for n in parts.under if n is not root]
            at = next((i for i, n in enumerate(over) if match.same(match.uncast(n), match.uncast(x))), None)
            if at is None or len(over) + len(under) + 1 != len(parts.over) + len(parts.under):
                continue
            leaf = over.pop(at)
            return Normal(
                leaf,
                result,
                max(result.eps, result.clamp_min**2) / result.scale,
                parts.number / math.sqrt(result.scale),
                over,
                under,
                [*parts.nodes, root, *result.nodes],
            )
    return None


def roots(flat: algebra.Product) -> Iterator[tuple[fx.Node, moments.RootMoment]]:
    for n in flat.over:
        if (result := moments.inverse_root(n)) is not None:
            yield n, result
    for n in flat.under:
        if (result := moments.root(n)) is not None:
            yield n, result


def scaled_on(node: fx.Node, number: float, width: int | None = None) -> tuple[fx.Node, float, list[fx.Node]]:
    """(last node, 1.0, nodes) where ``number * node`` is multiplied on, by numbers alone, until nothing is left of the
    number; else (node, number, []). With ``width`` one vector of that length may be among the factors."""
    last, nodes, remaining = node, [], number
    while not math.isclose(remaining, 1.0, rel_tol=1e-7):
        user = only_user(last)
        factor = algebra.linear_step(user)
        if factor is not None and factor[2] == 0 and factor[0] is last:
            remaining *= factor[1]
        elif width is not None and any(
            v is last and isinstance(w, fx.Node) and is_vector(w, width)
            for v, w in match.operands(user, aten.mul.Tensor)
        ):
            width = None
        elif not (match.is_call(user, aten.to.dtype) and match.is_float(user)):
            return node, number, []
        nodes.append(last)
        last = user
    return last, 1.0, nodes


def strip_widening(x: fx.Node) -> fx.Node:
    """The 16-bit tensor that ``x`` is the widened form of, else ``x``."""
    source = match.uncast(x)
    return source if match.value(source).itemsize < match.value(x).itemsize and match.value(source).itemsize == 2 else x


def only_user(node: fx.Node | None) -> fx.Node | None:
    return next(iter(node.users)) if node is not None and len(node.users) == 1 else None


def is_vector(n: fx.Node, width: int) -> bool:
    return match.is_float(n) and match.value(n).dim() == 1 and match.value(n).shape[0] == width


def widened_sum(total: fx.Node) -> str | None:
    """Why the norm of ``total`` and the sum of two tensors behind it stay apart, where a cast is between them."""
    summed = match.uncast(total)
    if (
        summed is total
        or not match.is_call(summed, aten.add.Tensor)
        or not all(isinstance(a, fx.Node) for a in summed.args)
    ):
        return None
    return f"the sum is {match.value(summed).dtype} and the norm of it is used in {match.value(total).dtype}".replace(
        "torch.", ""
    )
