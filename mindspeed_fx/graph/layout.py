"""How a tensor of a graph is stored: transposed, copied into another order, or free to be stored in any."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.graph.match import ADD, MUL, aten, is_call, value
from mindspeed_fx.graph.op_sets import TRANSPOSES


def strip_transpose(n: fx.Node, *through: Any) -> tuple[fx.Node, bool]:
    """(x, flag) when the matrix ``n`` is x, transposed if ``flag``; also past calls of ``through``, which keep their
    input's shape.
    """
    flag = False
    while is_call(n, *TRANSPOSES, *through):
        if is_call(n, aten.permute.default):
            flag ^= [d % 2 for d in n.args[1]] == [1, 0]
        elif is_call(n, aten.transpose.int):
            flag ^= n.args[1] % 2 != n.args[2] % 2
        else:
            flag ^= n.target == aten.t.default
        n = n.args[0]
    return n, flag


def is_transpose(n: Any) -> bool:
    """Whether ``n`` has the last two dimensions of its input exchanged, and the others as they are."""
    if is_call(n, aten.mT.default) or (is_call(n, aten.t.default) and value(n).dim() == 2):
        return True
    rank = value(n).dim() if is_call(n, aten.transpose.int, aten.permute.default) else 0
    if is_call(n, aten.transpose.int):
        return rank > 1 and {d % rank for d in n.args[1:3]} == {rank - 1, rank - 2}
    return rank > 1 and [d % rank for d in n.args[1]] == [*range(rank - 2), rank - 1, rank - 2]


def before_copy(n: Any) -> Any:
    """x when ``n`` is x stored in another order, as ``rewrite.substitute`` writes it; else ``n``."""
    if is_call(n, aten.contiguous.default):
        return n.args[0]
    if (
        is_call(n, aten.permute.default)
        and is_call(middle := n.args[0], aten.contiguous.default)
        and is_call(inner := middle.args[0], aten.permute.default)
    ):
        return inner.args[0] if [inner.args[1][d] for d in n.args[1]] == list(range(len(n.args[1]))) else n
    return n


def past_copy(n: fx.Node) -> fx.Node:
    """The node that stores ``n`` in another order, where nobody else reads ``n``; else ``n``."""
    last = n
    while len(last.users) == 1 and is_call(
        user := next(iter(last.users)), aten.permute.default, aten.contiguous.default
    ):
        last = user
        if before_copy(last) is n:
            return last
    return n


def layout_is_free(node: fx.Node, becomes: torch.Tensor, depth: int = 8) -> bool:
    """True when ``node`` may be stored as the fake tensor ``becomes`` is: every use copies or only reads elements, and
    what it makes of them is stored as before, or free again."""
    for user in node.users:
        if is_call(user, aten.contiguous.default, aten.linear.default):
            continue
        if depth == 0 or not is_call(
            user,
            *ADD,
            *MUL,
            aten.clone.default,
            aten.reshape.default,
            aten.transpose.int,
            aten.permute.default,
            aten.to.dtype,
        ):
            return False
        args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: becomes if n is node else n.meta["val"])
        with fake.fake_like(value(user)), torch.no_grad():
            result = user.target(*args, **kwargs)
        if fake.layout(result) != fake.layout(value(user)) and not layout_is_free(user, result, depth - 1):
            return False
    return True
