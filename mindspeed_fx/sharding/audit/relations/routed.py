"""What a walk makes of rows on their way to experts, and of the integers that send them there."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.sharding.audit.relations import columns, rows, rules
from mindspeed_fx.sharding.audit.relations.numbers import Numeric
from mindspeed_fx.sharding.audit.relations.parts import Fill, Part, Unknown, Unproved

SENDS = "expert_exchange"
VIEWS = ("view", "_unsafe_view", "reshape")


def concerns(short: str, args: Sequence[Any]) -> bool:
    return short == "moe_permute" or any(
        isinstance(a, (rows.Rows, rows.Order, columns.Stacked, Numeric)) for a in pytree.tree_leaves(list(args))
    )


def apply(c: rows.Context, nodes: Sequence[fx.Node], name: str, args: list) -> Any:
    """The relation of one place of the programs."""
    n, short = nodes[0], name.rpartition(".")[2]
    if short == "moe_permute" and isinstance(args[0], Part) and isinstance(args[1], Part):
        return rows.permuted(c, args[0], args[1])
    moved = (rows.Rows, rows.Order, columns.Stacked)
    if short == "split" and isinstance(args[0], moved) and isinstance(args[1], int):
        return ("pieces", *args[:2], (args[2:] or [0])[0])
    leaves = pytree.tree_leaves(args)
    if not any(isinstance(a, moved) for a in leaves):
        return Numeric()
    if short == "cat" and all(isinstance(a, rows.Rows) for a in args[0]):
        return columns.joined(args[0], (args[1:] or [0])[0] % 2)
    if any(isinstance(a, rows.Rows) and a.part.picked for a in leaves):
        raise Unknown("pieces of rows that are not joined")
    result = _sent_columns(c, short, args) if _is_sent(n) else None
    result = result or _moved(c, nodes, short, args) or _at_experts(c, short, args)
    if result is not None:
        return result
    read = [a for a in leaves if not isinstance(a, (int, float, str, bool, torch.dtype, type(None)))]
    if all(isinstance(a, rows.Rows) for a in read) and (name in rules.RULES or short in rules.POINTWISE):
        commutes = short in ("add", "mul") and len(read) == len(args) and not n.kwargs
        results = rows.each(c, name, short, read, commutes)
        return results if len(n.target._schema.returns) > 1 else results[0]  # type: ignore[union-attr]
    raise Unknown("no rule for rows on their way to experts")


def rule_key(n: fx.Node) -> tuple:
    """Numbers and words among the arguments; sizes are a rank's own, and left out where an operator has some."""
    name = getattr(n.target, "_opname", "")
    if name in ("moe_permute", "moe_permute_backward", "moe_unpermute", "moe_unpermute_backward"):
        return ()
    plain = pytree.tree_map(lambda a: "tensor" if isinstance(a, fx.Node) else a, list(n.args))
    return repr(plain), repr(sorted(n.kwargs.items()))


def item(value: tuple, nodes: Sequence[fx.Node]) -> Any:
    """The piece of rows, or of their order, that each rank takes of a split."""
    _, x, size, dim = value
    index = [m.args[1] for m in nodes]
    if isinstance(x, rows.Rows) and not dim:
        return x.moved([p.split(size)[i] for p, i in zip(x.pairs, index)])  # type: ignore[index]
    extent = x.part.local[1] if isinstance(x, rows.Rows) else len(_first(x))
    if isinstance(x, columns.Stacked):
        extent *= x.count
    if extent % size or isinstance(x, columns.Stacked) and (dim or extent // size != x.count):
        raise Unknown(f"{extent} in pieces of {size}")
    if isinstance(x, rows.Rows):
        return columns.piece(x, extent // size, index)  # type: ignore[arg-type]
    return x.piece(index) if isinstance(x, columns.Stacked) else x.piece(extent // size, index)


def _first(x: Any) -> Any:
    """Of the first rank: the pairs of rows, or the positions of an order."""
    return x.rows.pairs[0] if isinstance(x, columns.Stacked) else x.positions[0]


def _is_sent(n: fx.Node) -> bool:
    return getattr(n.target, "namespace", "") == "_c10d_functional" or getattr(n.target, "_opname", "") == SENDS


def _sent_columns(c: rows.Context, short: str, args: list) -> Any:
    """Where columns are sent, or rows whose columns ranks share; None for rows that they have whole."""
    x, mesh = args[0], c.mesh()
    if isinstance(x, columns.Stacked):
        if short == "reduce_scatter_tensor" and args[1] == "sum":
            return columns.scattered(c, x, mesh)
        raise Unknown(f"{short} of columns one below the other")
    if isinstance(x, rows.Rows) and mesh in x.part.meshes():
        if short == "all_gather_into_tensor":
            return columns.gathered(c, x, mesh)
        raise Unproved(f"{short} over {mesh} of rows whose columns are divided over it")
    return None


def _moved(c: rows.Context, nodes: Sequence[fx.Node], short: str, args: list) -> Any:
    """Rows in another order; None where the operator is none of those."""
    n, x = nodes[0], args[0]
    if short == "where" and isinstance(args[1], rows.Rows) and isinstance(args[2], Fill) and not args[2].value:
        return rows.masked(args[1], c.numbers(0))
    if not isinstance(x, rows.Rows):
        return None
    count = len(x.pairs[0])
    if short in VIEWS and tuple(n.meta["val"].shape) == (count, *x.part.local[1:]):
        return x
    if short == "index_select" and args[1] == 0:
        return rows.taken(x, c.numbers(2))
    if short == "slice" and all(_is_whole(m, (count, *x.part.local[1:])) for m in nodes):
        return x
    if short == "slice" and (args[1:] or [0])[0] == 0 and len(args) < 5:
        runs = [torch.arange(count)[slice(*m.args[2:4])] for m in nodes]  # type: ignore[arg-type]
        return rows.taken(x, runs)
    if short == "expert_exchange":
        return rows.exchanged(c, x, args[3], c.numbers(1), c.numbers(2))
    if short == "all_gather_into_tensor":
        return rows.gathered(c, x)
    if short in ("all_reduce", "reduce_scatter_tensor") and args[1] == "sum":
        return rows.added(c, x, short != "all_reduce")
    if short == "all_to_all_single":
        come, go = ([torch.tensor(m.args[i]) for m in nodes] for i in (1, 2))
        return rows.exchanged(c, x, int(come[0].sum()), go, come)
    return None


def _is_whole(n: fx.Node, shape: tuple[int, ...]) -> bool:
    """Whether a slice is all of the tensor."""
    dim, start, end, step = (*n.args[1:], *(0, 0, None, 1)[len(n.args) - 1 :])
    return slice(start, end, step).indices(shape[dim]) == (0, shape[dim], 1)  # type: ignore[arg-type, index]


def _at_experts(c: rows.Context, short: str, args: list) -> Any:
    if short == "grouped_matmul" and isinstance(args[0], rows.Rows) and isinstance(args[1], Part):
        return rows.product(c, args[0], args[1], c.numbers(2))
    if short == "grouped_matmul_backward" and all(isinstance(a, rows.Rows) for a in args[:2]):
        return list(rows.product_backward(c, args[0], args[1], args[2], c.numbers(3)))
    if short == "moe_unpermute" and isinstance(args[0], rows.Rows) and isinstance(args[1], rows.Order):
        return rows.unpermuted(c, short, args[0], args[1], args[2])
    if short == "moe_unpermute_backward" and isinstance(args[2], rows.Order):
        return list(rows.unpermuted_backward(c, args[0], args[1], args[2], args[3]))
    if short == "moe_permute_backward" and isinstance(args[1], rows.Order):
        return rows.unpermuted(c, short, args[0], args[1], None)
    return None
