"""Sinkhorn's algorithm as models spell it: a softmax, and divisions by sums of columns and rows in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten


@dataclass(frozen=True)
class Sinkhorn:
    """What a chain of divisions computes.

    Args:
        x: of the softmax [..., n, n].
        eps: added to entries and sums.
        iterations: of columns, and of rows between them.
        last: the last division by sums of columns.
        region: all that the operator replaces.
    """

    x: fx.Node
    eps: float
    iterations: int
    last: fx.Node
    region: list[fx.Node]


def read(softmax: fx.Node) -> Sinkhorn | str | None:
    """The chain that begins at a softmax; why not, where it nearly is one."""
    x = softmax.args[0]
    if match.rank(softmax) < 2 or not match.is_float(x) or match.value(softmax).dtype != match.value(x).dtype:
        return None
    dim, shape = match.argument(softmax, "dim"), match.value(softmax).shape
    if dim not in (-1, len(shape) - 1) or len(softmax.users) != 1:
        return None
    now = next(iter(softmax.users))
    plus = match.plus_number(now)
    if plus is None or plus[0] is not softmax:
        return None
    eps, ends, region = plus[1], [], [softmax, now]
    while (step := _divided(now, -2 if len(ends) % 2 == 0 else -1, eps)) is not None:
        region += step
        now = step[-1]
        ends.append((now, len(region)))
    if not ends:
        return None
    if shape[-1] != shape[-2]:
        return f"matrices of {shape[-2]} by {shape[-1]}; square ones are expected"
    if len(ends) % 2 == 0:  # rows last: that division stays
        ends.pop()
    last, count = ends[-1]
    return Sinkhorn(x, float(eps), (len(ends) + 1) // 2, last, region[:count])


def _divided(x: fx.Node, dim: int, eps: float) -> list[fx.Node] | None:
    """[sum, sum plus eps, quotient] where x is read by just x / (its sum along ``dim``, kept, plus eps)."""
    if len(x.users) != 2:
        return None
    total = next((n for n in x.users if match.is_call(n, aten.sum.dim_IntList)), None)
    if total is None or len(total.users) != 1 or not match.argument(total, "keepdim"):
        return None
    dims = match.argument(total, "dim")
    if len(dims) != 1 or dims[0] not in (dim, dim + match.rank(x)):
        return None
    under = next(iter(total.users))
    plus = match.plus_number(under)
    if plus is None or plus[0] is not total or plus[1] != eps or len(under.users) != 1:
        return None
    quotient = next(iter(under.users))
    if not match.is_call(quotient, aten.div.Tensor) or quotient.args[0] is not x or quotient.args[1] is not under:
        return None
    return [total, under, quotient]
