"""Operators that move digits, and products of matrices in their spellings."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Sequence

import torch.fx as fx

from mindspeed_fx.sharding.audit.relations import rules
from mindspeed_fx.sharding.audit.relations.parts import Part, Terms, Unproved, profile, regrouped


def cut(terms: Terms, x: Part, dim: int, start: int, end: int, step: int = 1) -> Part:
    """Every ``step``-th element from ``start`` to ``end`` of a dimension that every rank has whole."""
    if profile(x.dims[dim]):
        raise Unproved(f"elements {start} to {end} of a dimension of which ranks hold parts")
    size = len(range(start, end, step))
    shape = [size if i == dim else n for i, n in enumerate(x.whole)]
    shared = [profile(d) for d in x.dims]
    return terms.fresh(("cut", dim, start, size, step, x.arranged), shape, shared, x.partial)


def _sum_key() -> tuple:
    """That of a plain sum of two tensors."""
    return repr(["tensor", "tensor"]), repr([])


def is_identity(short: str, args: Sequence) -> bool:
    """Whether a number leaves what it is added to, or multiplied with, as it is."""
    number = args[1] if len(args) == 2 and isinstance(args[1], (int, float)) else None
    return number is not None and (short in ("mul", "div") and number == 1 or short in ("add", "sub") and number == 0)


def _viewed(terms: Terms, n: fx.Node, args: list) -> Part:
    return regrouped(args[0], tuple(n.meta["val"].shape), terms.known)


def _permuted(x: Part, order: Sequence[int]) -> Part:
    return replace(x, dims=tuple(x.dims[i] for i in order))


def _transposed(terms: Terms, n: fx.Node, args: list) -> Part:
    x, rank = args[0], len(args[0].dims)
    order = list(range(rank))
    one, two = (d % rank for d in args[1:3]) if len(args) > 1 else (0, 1)
    if rank > 1:
        order[one], order[two] = two, one
    return _permuted(x, order)


MOVES: dict[str, Callable] = {
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"], _viewed),
    "permute": lambda terms, n, args: _permuted(args[0], [i % len(args[0].dims) for i in args[1]]),
    **dict.fromkeys(["transpose", "t"], _transposed),
}  # fmt: skip


def _linear(terms: Terms, args: list, n: fx.Node) -> Part:
    x, w = args[:2]
    result = rules.dot(terms, x, [len(x.dims) - 1], w, [1])
    if len(args) > 2 and isinstance(args[2], Part):  # on rows, as addmm adds it
        rows = replace(result, dims=(tuple(d for dim in result.dims[:-1] for d in dim), result.dims[-1]))
        added = rules.pointwise(terms, "add", _sum_key(), [rows, args[2]], True)
        return regrouped(added, result.local, terms.known)
    return result


def _linear_backward(terms: Terms, args: list, n: fx.Node) -> list[Part | None]:
    g, x, w, wanted = args
    rows = list(range(len(g.dims) - 1))
    return [
        rules.dot(terms, g, [len(rows)], w, [0]) if wanted[0] else None,
        rules.dot(terms, g, rows, x, rows) if wanted[1] else None,
        rules.summed(terms, g, rows, False) if wanted[2] else None,
    ]


def _sum(terms: Terms, args: list, n: fx.Node) -> Part:
    x = args[0]
    over = [d % len(x.dims) for d in args[1]] if len(args) > 1 and args[1] else list(range(len(x.dims)))
    return rules.summed(terms, x, over, len(args) > 2 and bool(args[2]))


PRODUCTS: dict[str, Callable] = {
    "linear": _linear,
    "linear_backward": _linear_backward,
    "addmm": lambda terms, args, n: rules.pointwise(
        terms, "add", _sum_key(), [rules.dot(terms, args[1], [1], args[2], [0]), args[0]], True
    ),
    "mm": lambda terms, args, n: rules.dot(terms, args[0], [1], args[1], [0]),
    "sum": _sum,
}  # fmt: skip
