"""How an operator may be computed in parts, as rows of (dimensions of results, dimensions of tensor arguments).

``mindspeed::`` operators have their rules in their own files; here are those of ATen's, and the rows that the program
of a plan adds to both (``sharding/spmd/operators.py``, ``sharding/spmd/vocabulary.py``). A number is the dimension that
is divided, ``REPLICATED`` the whole, ``PARTIAL`` a sum; the whole on every rank is always a way and is not listed.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import tracing
from mindspeed_fx.compat.placements import PARTIAL, REPLICATED
from mindspeed_fx.graph.op_sets import is_pointwise
from mindspeed_fx.graph.schema import all_arguments, argument
from mindspeed_fx.kernels.base import REGISTRY
from mindspeed_fx.kernels.sharding import along
from mindspeed_fx.kernels.sharding import strategies as declared
from mindspeed_fx.sharding.divided_dims import is_pointwise_function

R, P = REPLICATED, PARTIAL
Row = tuple[list[Any], list[Any]]

ALONG_DIM = frozenset("softmax _softmax log_softmax _safe_softmax cumsum sort argsort topk".split())
"""Operators that work along one dimension; every other may be divided."""
PARTS = frozenset(
    "split split_with_sizes chunk gather scatter scatter_add slice narrow slice_scatter select_scatter index_select "
    "flip roll".split()
)
"""Operators that take or put pieces along one dimension, or several: every other dimension that all have in common may
be divided."""
LIKE = frozenset(
    ("zeros_like", "ones_like", "empty_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
)
SUMS = frozenset(
    ("sum", "mean", "amax", "amin", "prod", "count_nonzero", "all", "any", "argmax", "argmin", "logsumexp")
)
LINEAR_SUMS = frozenset(("sum", "count_nonzero"))
COUNTS = frozenset(("bincount", "histc", "one_hot_sum"))
ATTENTIONS = frozenset(("attention", "scaled_dot_product_attention"))
BY_EXPERT = frozenset(("grouped_matmul", "rows_by_expert"))
"""Operators of (rows sorted by expert, what each expert has)."""
EXPERTS = BY_EXPERT | {"moe_permute", "moe_unpermute"}
"""Operators of rows by expert; what works row by row between them is any."""


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments of ``node`` that are tensors, in order; lists are looked into."""
    return [
        a
        for a in pytree.tree_leaves((node.args, node.kwargs))
        if isinstance(a, fx.Node) and isinstance(a.meta.get("val"), torch.Tensor)
    ]


def name_of(node: fx.Node) -> str:
    """ "linear", "attention" ...: the operator without namespace and overload."""
    return (
        str(getattr(node.target, "overloadpacket", getattr(node.target, "__name__", node.target)))
        .rpartition(".")[2]
        .removesuffix("_")
    )


def strategy_rows(node: fx.Node) -> list[Row] | None:
    """The ways of ``node``; None for an operator without a rule, which is computed whole."""
    name, known = name_of(node), REGISTRY.get(node.target)
    values = [a.meta["val"] for a in tensor_arguments(node)]
    out = node.meta["val"]
    if name in _OWN:
        return _OWN[name](node, values, out)
    if known is not None:
        return _declared_rows(known, node) + _added_rows(name, node, values)
    if name in PARTS:
        return _pieces(node, name, out, values)
    if name in LIKE and isinstance(out, torch.Tensor):
        return (
            [([d], [d]) for d in range(out.ndim) if out.shape[d] == values[0].shape[d]]
            if out.ndim == values[0].ndim
            else None
        )
    if not isinstance(out, torch.Tensor):
        return _along(node, out[0], values) if name in ALONG_DIM and isinstance(out, (tuple, list)) else None
    if name in ALONG_DIM:
        return _along(node, out, values)
    if name in SUMS:
        return _reduction(node, name, values[0], out)
    if name in COUNTS:
        return [([P], [d, *[R] * (len(values) - 1)]) for d in range(values[0].ndim)]
    if is_pointwise(node.target) or (tracing.is_higher_order(node.target) and is_pointwise_function(node)):
        return [([d], [along(v, d, out.ndim) for v in values]) for d in range(out.ndim)]
    return None


def _declared_rows(known: Any, node: fx.Node) -> list[Row]:
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda a: a.meta.get("val"))
    full = all_arguments(known.overload, args, kwargs)
    return [r for r in declared(known, full) if any(p not in (R,) for p in (*r[0], *r[1]))]


def _added_rows(name: str, node: fx.Node, values: Sequence[torch.Tensor]) -> list[Row]:
    """Rows that the local program can compute beyond the operator's own rule."""
    if name == "attention":  # queries divided, keys and values whole; causal becomes a mask of the rank's rows
        return [([2, 2], [2, R, R, *(along(v, 2, 4) if i == 3 else R for i, v in enumerate(values[3:], 3))])]
    if name == "cross_entropy":
        return [([R, R], [1, R])]
    return []


def _linear(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    last, more = values[0].ndim - 1, len(values) - 2
    return [([d], [d, R, *[R] * more]) for d in range(last)] + [
        ([last], [R, 0, *[0] * more]),
        ([P], [last, 1, *[R] * more]),
    ]


def _matmul(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    x, y = values[-2:] if name_of(node) in ("addmm", "baddbmm") else values[:2]
    extra = [R] if len(values) > 2 else []
    if x.ndim < 2 or y.ndim < 2:
        return []
    batch = [([d], [*extra, along(x, d, out.ndim), along(y, d, out.ndim)]) for d in range(out.ndim - 2)]
    rows, columns = ([out.ndim - 2], [*extra, x.ndim - 2, R]), ([out.ndim - 1], [*extra, R, y.ndim - 1])
    return batch + [rows, columns, ([P], [*extra, x.ndim - 1, y.ndim - 2])]


def _embedding(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    return [([d], [R, d]) for d in range(out.ndim - 1)] + [([P], [0, R]), ([out.ndim - 1], [1, R])]


def _loss(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    """By token: a sum; by class: the ranks exchange numbers of each token inside (``vocabulary.py``)."""
    bias = len(values) - 3
    return [([P], [0, R, *[R] * bias, 0]), ([R], [R, 0, *[0] * bias, R])]


def _along(node: fx.Node, out: torch.Tensor, values: Sequence[torch.Tensor]) -> list[Row]:
    dim = argument(node, "dim", -1) % max(out.ndim, 1)
    results = len(node.target._schema.returns)
    return [([d] * results, [d]) for d in range(out.ndim) if d != dim]


def _pieces(node: fx.Node, name: str, out: Any, values: Sequence[torch.Tensor]) -> list[Row]:
    """Along the dimensions that an operator leaves as they are, and that results and arguments have in common."""
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    arg = argument(node, "dims" if name in ("flip", "roll") else "dim")
    touched = {d % values[0].ndim for d in ([arg] if isinstance(arg, int) else arg)}
    matches: list[Row] = []
    for d in range(values[0].ndim):
        tensors = [*results, *(v for v in values if name != "index_select" or v is values[0])]
        if d in touched or any(
            t.ndim <= d or t.shape[d] != values[0].shape[d]
            for t in tensors
            if name != "select_scatter" or t.ndim == values[0].ndim
        ):
            continue
        ins = [_neighbour_rows(name, i, v, d, touched, values[0].ndim) for i, v in enumerate(values)]
        matches.append(([d] * len(results), ins))
    return matches


def _neighbour_rows(name: str, i: int, value: torch.Tensor, d: int, touched: set[int], ndim: int) -> Any:
    """The dimension of argument ``i`` that goes with dimension ``d`` of the first."""
    if name == "index_select" and i == 1:
        return R
    if value.ndim == ndim:
        return d
    return d - (min(touched) < d)  # select_scatter's source has no such dimension


def _reduction(node: fx.Node, name: str, x: torch.Tensor, out: torch.Tensor) -> list[Row]:
    dims = argument(node, "dim")
    gone = (
        {d % max(x.ndim, 1) for d in ([dims] if isinstance(dims, int) else dims)}
        if dims not in (None, [], ())
        else set(range(x.ndim))
    )
    keep = out.ndim == x.ndim
    remaining = [d for d in range(x.ndim) if d not in gone]
    results: list[Row] = [([d if keep else remaining.index(d)], [d]) for d in remaining]
    # A mean of parts of equal size is the mean of their means: a sum with a factor, which costs the same.
    return results + ([([P], [d]) for d in gone] if name in LINEAR_SUMS or name == "mean" else [])


def _cat(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    """Along every dimension but the one that is joined."""
    return [([d], [d] * len(values)) for d in range(out.ndim) if d != argument(node, "dim") % max(out.ndim, 1)]


def _permute(node: fx.Node, values: Sequence[torch.Tensor], out: Any) -> list[Row]:
    """Each rank sorts its own tokens by expert, as expert-parallel programs do; or all tokens, and has the rows of its
    own experts.
    """
    return [([0, 0], [0, 0]), ([0, 0], [R, R])]


def _unpermute(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    """Own tokens; or all tokens as sums over the ranks, each with what its experts made."""
    probs = len(values) - 2
    return [([0], [0, 0, *[0] * probs]), ([P], [0, 0, *[R] * probs])]


def _grouped_rows(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    """By token with every expert's weight; by expert with the tokens that chose it; inside the experts, by column and
    by summand, for which no program is made (``Prices.inside``)."""
    return [([0], [0, R, R]), ([0], [0, 0, R]), ([1], [R, 2, R]), ([P], [1, 1, R])]


def _table_rows(node: fx.Node, values: Sequence[torch.Tensor], out: torch.Tensor) -> list[Row]:
    """By token with the whole table; by expert with its row; along what a row is."""
    return [([0], [0, R, 0]), ([0], [0, 0, R]), *(([d], [R, d, R]) for d in range(1, out.ndim))]


def is_told_by_name(node: Any) -> bool:
    """Whether a plan can place what an operator of a :class:`problem.Node` reads: one of ATen's is called for other
    things, too, and its name says them all."""
    return node.op in ATTENTIONS or node.call.kind == "operator"


def by_expert(op: str, outs: Sequence[Any], ins: Sequence[Any]) -> bool:
    """Whether this way of an operator of a mixture has rows by expert and not by token."""
    if op in BY_EXPERT:
        return ins[1] == 0
    return len(ins) > 1 and {"moe_permute": ins[0] == R, "moe_unpermute": outs[0] == P}.get(op, False)


_OWN = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _matmul,
    "embedding": _embedding,
    "cat": _cat,
    "linear_cross_entropy": _loss,
    "moe_permute": _permute,
    "moe_unpermute": _unpermute,
    "grouped_matmul": _grouped_rows,
    "rows_by_expert": _table_rows,
}
