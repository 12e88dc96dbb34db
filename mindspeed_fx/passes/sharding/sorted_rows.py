"""What stands between tokens sorted by expert and the products that read them, moved in front of the sort.

A module of experts may get rows that are sorted already. A plan's edges of such a module are those of the tokens, and
what comes of the module is placed behind the way back: rows on their way to experts are no part of a tensor. Rows that
are multiplied by their choice's weight before the experts (torchtitan) are tokens that were multiplied, a copy for each
choice, before they were sorted: the same products, of as many rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.sharding.constraint import constrain

aten, ops = torch.ops.aten, torch.ops.mindspeed
SAME = frozenset(
    (
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.clone.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten._to_copy.default,
        aten.squeeze.dim,
        aten.unsqueeze.default,
        aten.detach.default,
        constrain,
    )
)
"""Operators that keep a list of choices, but for its shape and type."""
SORTS = frozenset((aten.sort.default, aten.sort.stable))


def choices(n: Any) -> Any:
    """The list of choices that ``n`` is, whatever its shape, type and order."""
    while isinstance(n, fx.Node):
        if n.target in SAME:
            n = n.args[0]
        elif n.target is operator.getitem and n.args[1] == 0 and n.args[0].target in SORTS:
            n = n.args[0].args[0]
        else:
            break
    return n


def move_edges(node: fx.Node) -> None:
    """Edges at rows that ``node``, a ``moe_permute``, sorted: before products those of its tokens, behind them those of
    what the rows are summed to."""
    rows = [u for u in node.users if u.args[1] == 0]
    seen: set[fx.Node] = set()
    todo = [(n, False) for n in rows]
    while todo:
        n, computed = todo.pop()
        if n in seen:
            continue
        seen.add(n)
        for user in list(n.users):
            if user.target is constrain and user.args[0] is n:
                _move(node, user, computed)
                todo.append((n, computed))
                seen.discard(n)
                break
            if user.target is ops.moe_unpermute.default or user.target is ops.moe_permute.default:
                continue
            todo.append((user, computed or user.target is ops.grouped_matmul.default))


def _move(node: fx.Node, edge: fx.Node, computed: bool) -> None:
    graph, key = node.graph, edge.args[1]
    if not computed:
        with graph.inserting_before(node):
            node.replace_input_with(node.args[0], _edge(graph, node.args[0], key, edge))
    else:
        for end in _ends(edge):
            with graph.inserting_after(end):
                new = _edge(graph, end, key, edge)
            end.replace_all_uses_with(new, delete_user_cb=lambda u, new=new: u is not new)
    edge.replace_all_uses_with(edge.args[0])
    graph.erase_node(edge)


def _edge(graph: fx.Graph, x: fx.Node, key: Any, like: fx.Node) -> fx.Node:
    new = graph.call_function(constrain, (x, key))
    new.meta = {**like.meta, "val": x.meta["val"]}
    return new


def _ends(n: fx.Node) -> list[fx.Node]:
    """The sums over a token's rows that ``n`` goes to."""
    results, seen, todo = [], set(), [n]
    while todo:
        for user in todo.pop().users:
            if user.target is ops.moe_unpermute.default:
                results += [user] if user not in results else []
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return results


def sorted_table(n: Any, indices: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """(table [experts, ...], casts of the result) when ``n`` is its rows by the experts in ``indices`` in their order,
    as each row's biases are."""
    casts: list[fx.Node] = []
    while match.is_call(n, aten.to.dtype, aten._to_copy.default):
        casts.insert(0, n)
        n = n.args[0]
    gathered = match.indexed_rows(n) if isinstance(n, fx.Node) else None
    return (gathered[0], casts) if gathered is not None and _is_sorted(gathered[1], indices) else None


def _is_sorted(n: Any, indices: fx.Node) -> bool:
    """Whether ``n`` is the experts in ``indices`` in order: of a sort, or taken by its places."""
    while match.is_call(n, *SAME):
        n = n.args[0]
    if match.is_call(n, operator.getitem) and n.args[1] == 0 and n.args[0].target in SORTS:
        return not match.argument(n.args[0], "descending", False) and choices(n) is choices(indices)
    return (
        isinstance(n, fx.Node)
        and (taken := _sorted_weights(n, indices)) is not None
        and (choices(taken) is choices(indices))
    )


def weigh_before(gm: fx.GraphModule, node: fx.Node) -> fx.Node:
    """``moe_permute(x, choices) * weights in that order`` becomes ``moe_permute(copies of x * weights, choices)``; the
    ``moe_permute`` to go on with."""
    tokens, indices = node.args
    rows, order = ([u for u in node.users if u.args[1] == i] for i in (0, 1))
    readers = {u for n in rows for u in n.users}
    product = next(iter(readers), node)
    if len(readers) != 1 or not match.is_call(product, aten.mul.Tensor) or product.args[0] is product.args[1]:
        return node
    weight = _sorted_weights(next(a for a in product.args if a not in rows), indices)
    places = {n: i for i, n in enumerate(gm.graph.nodes)}
    if weight is None or any(places[u] < places[product] for o in order for u in o.users):
        return node

    def call(target: Any, *args: Any) -> fx.Node:
        return rewrite.insert(gm, product, target, args)

    k = match.value(indices).numel() // match.value(tokens).shape[0]
    copies = tokens if k == 1 else call(aten.repeat_interleave.self_int, tokens, k, 0)
    scaled = call(aten.mul.Tensor, copies, call(aten.reshape.default, weight, [-1, 1]))
    new = call(ops.moe_permute.default, scaled, indices)
    product.replace_all_uses_with(call(operator.getitem, new, 0))
    for n in order:
        n.replace_all_uses_with(call(operator.getitem, new, 1))
    for n in (product, *rows, *order, node):
        gm.graph.erase_node(n)
    return new


def _sorted_weights(n: Any, indices: fx.Node) -> fx.Node | None:
    """w [choices] when ``n`` [choices, 1] is w in the order of the experts in ``indices``."""
    while match.is_call(n, aten.unsqueeze.default, *match.RESHAPES):
        n = n.args[0]
    gathered = match.indexed_rows(n) if isinstance(n, fx.Node) else None
    if gathered is None or match.value(gathered[0]).numel() != match.value(indices).numel():
        return None
    order = gathered[1]
    if match.is_call(order, operator.getitem) and order.args[1] == 1:
        order = order.args[0]
    is_sort = match.is_call(order, aten.argsort.stable, aten.sort.stable)
    same = is_sort and not match.argument(order, "descending", False) and choices(order.args[0]) is choices(indices)
    return gathered[0] if same else None
