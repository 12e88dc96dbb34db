"""What the norms share: a value divided by its root mean square or deviation, and the weights around it."""

from __future__ import annotations

from typing import Callable

import torch.fx as fx

from mindspeed_fx.passes.base import PassReport, site
from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten


def normal(node: fx.Node) -> list[tuple[fx.Node, fx.Node, float, list[fx.Node]]]:
    """(x, inside, eps, nodes) wherever ``node`` may be read as x / sqrt(inside + eps), in any spelling."""
    pairs = [(x, match.inverse_root(_below(r)), r) for x, r in match.operands(node, aten.mul.Tensor) if isinstance(r, fx.Node)]
    if match.is_call(node, aten.div.Tensor) and isinstance(node.args[1], fx.Node):
        pairs.append((node.args[0], match.root(_below(node.args[1])), node.args[1]))
    found = []
    for x, inside, r in pairs:
        if isinstance(inside, fx.Node) and match.is_float(x) and match.is_column(r, x):
            plus = match.plus_number(inside)
            value, eps = plus if plus else (inside, 0.0)
            found.append((x, match.uncast(value), float(eps), [r, inside, value]))
    return found


def _below(r: fx.Node) -> fx.Node:
    return match.uncast(match.uncolumn(match.uncast(r)))


def weighted(n: fx.Node, of: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, weight) when ``n`` is x times a vector as long as its rows, where x is ``of`` in some type."""
    for x, weight in match.operands(match.uncast(n), aten.mul.Tensor):
        if isinstance(weight, fx.Node) and is_vector(weight, match.value(n).shape[-1]) and match.same(match.uncast(x), of) and match.value(x).shape == match.value(n).shape:
            return x, weight
    return None


def unwidened(x: fx.Node) -> fx.Node:
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
    if summed is total or not match.is_call(summed, aten.add.Tensor) or not all(isinstance(a, fx.Node) for a in summed.args):
        return None
    return f"the sum is {match.value(summed).dtype} and the norm of it is used in {match.value(total).dtype}".replace("torch.", "")


def fuse_sum(gm: fx.GraphModule, report: PassReport, norm: fx.Node, parameters: list, operator: str, make: Callable, results: tuple[int, ...]) -> str | None:
    """``norm`` of a sum of two tensors, and the sum, become one operator; returns the reason where they do not.

    Args:
        norm: a call whose first argument is the sum.
        parameters: weight and bias, nodes or None.
        make: overload called with (x, residual, *the other arguments of ``norm``); its second result is the sum.
        results: which result of ``make`` stands for each result of ``norm``.
    """
    total = norm.args[0]
    x, residual = total.args
    if total.kwargs.get("alpha", 1) != 1:
        return f"the residual is scaled by {total.kwargs['alpha']}"
    values = [match.value(n) for n in (x, residual, total)]
    if any(v.dtype != values[2].dtype or v.shape != values[2].shape for v in values):
        return "the two summands differ in shape or type: " + ", ".join(f"{tuple(v.shape)} {v.dtype}" for v in values[:2])
    reason = match.unsafe([total, norm], [x, residual, *parameters])
    if reason:
        return reason
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    # The operator stands where the sum stood, unless a weight is made later; then nobody may read the sum before it.
    if all(p is None or order[p] < order[total] for p in parameters):
        before = total
    elif all(order[u] >= order[norm] for u in total.users):
        before = norm
    else:
        return "the sum is used before the weight of the norm exists"
    made = match.insert(gm, before, make, (x, residual, *norm.args[1:]))
    for key in ("nn_module_stack", "stack_trace", "source_fn_stack"):
        if key in norm.meta:
            made.meta[key] = norm.meta[key]
    stands_for = [match.insert(gm, before, match.operator.getitem, (made, i)) for i in results]
    for user in list(norm.users):
        user.replace_all_uses_with(stands_for[user.args[1]])
    report.rewrites.append(site(operator, norm, [total, norm]))
    return match.substitute(gm, total, match.insert(gm, before, match.operator.getitem, (made, 1)))
