"""What a value says of row i and column j, by abstract interpretation instead of evaluation.

Masks are made of position indices: ``arange``, shifts, comparisons, ``triu`` and ``tril``, boolean logic, ``where``.
What is said of row i and column j (:mod:`mindspeed_fx.passes.fusion.analysis.bands`) holds for every size, symbolic
ones included. Numbers of documents, equal at row and column where attention is allowed, are a part of the answer
(:mod:`mindspeed_fx.passes.fusion.analysis.sequence_ids`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.bands import (
    BLOCKED,
    Band,
    Distance,
    Index,
    Meaning,
    compare_distance,
    complement,
)
from mindspeed_fx.passes.fusion.analysis.sequence_ids import find_sequence_ids, long_dims


def meaning(n: Any, depth: int = 40, known: dict[fx.Node, Meaning] | None = None) -> Meaning:
    """What ``n`` says of position (i, j); None when that cannot be told. Each node is looked at once (``known``)."""
    if isinstance(n, (bool, int, float)):
        return n
    known = {} if known is None else known
    if depth == 0 or not isinstance(n, match.NODES) or n.op != "call_function" or n.meta.get("mutated"):
        return None
    if n not in known:
        handler = _HANDLERS.get(n.target)
        known[n] = handler(n, lambda m: meaning(m, depth - 1, known)) if handler else None
    return known[n]


def _arange(n: fx.Node, of) -> Meaning:
    start = n.args[0] if n.target is aten.arange.start else 0
    return Index(1, start) if isinstance(start, int) else None


def _constant(n: fx.Node, of) -> Meaning:
    if n.target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default):
        return of(match.argument(n, "fill_value", n.args[0]))
    return 1 if "ones" in str(n.target) else 0


def _read_full(n: fx.Node, of) -> Meaning:
    return of(n.args[1])


def _same_value(n: fx.Node, of) -> Meaning:
    return of(n.args[0])


def _written_down(n: fx.Node, of) -> Meaning:
    """Numbers in the model's code that count up by one, such as ``range(n)`` as an index."""
    held = match.written_down(n)
    if held is None or held.dim() != 1 or not held.numel() or held.dtype not in (torch.int32, torch.int64):
        return None
    with tracing.outside_tracing():
        first = int(held[0])
        return (
            Index(1, first)
            if torch.equal(held, torch.arange(first, first + held.numel(), dtype=held.dtype, device=held.device))
            else None
        )


def _cast(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    if isinstance(inner, Band) and match.value(n).dtype == torch.bool:
        return inner.valued(bool(inner.inside), bool(inner.outside))
    return inner


def _read_view(n: fx.Node, of) -> Meaning:
    """Unsqueeze, view, transpose ...: an index moves with the one dimension that is not 1; a band needs its last
    two.
    """
    inner, source = of(n.args[0]), n.args[0]
    if isinstance(inner, Index):
        if n.target is aten.unsqueeze.default:
            dim = n.args[1] % match.rank(n)
            return Index(inner.dim + (match.value(n).dim() - dim <= inner.dim), inner.offset)
        if n.target is aten.transpose.int:
            a, b = (match.value(n).dim() - d % match.rank(n) for d in n.args[1:])
            return Index({a: b, b: a}.get(inner.dim, inner.dim), inner.offset)
        before, after = long_dims(source), long_dims(n)
        return Index(after[0], inner.offset) if before == [inner.dim] and len(after) == 1 else None
    if isinstance(inner, Band):
        kept_last = match.value(n).shape[-2:] == match.value(source).shape[-2:] and n.target is not aten.transpose.int
        return inner if kept_last else None
    if isinstance(inner, Distance):
        return (
            inner
            if match.value(n).shape[-2:] == match.value(source).shape[-2:] and n.target is not aten.transpose.int
            else None
        )
    return inner


def _expand(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    return (
        inner
        if not isinstance(inner, (Band, Distance)) or match.value(n).shape[-2:] == match.value(n.args[0]).shape[-2:]
        else None
    )


def _slice(n: fx.Node, of) -> Meaning:
    inner, piece = of(n.args[0]), match.part(n)
    if isinstance(inner, (int, float)):
        return inner
    if piece is None or piece.step != 1:
        whole = match.value(n).shape == match.value(n.args[0]).shape
        return inner if whole else None
    dim = match.value(n).dim() - piece.dim
    if isinstance(inner, Index):
        if dim == inner.dim and piece.stop - piece.start == 1:
            return inner.offset + piece.start
        return Index(inner.dim, inner.offset + (piece.start if dim == inner.dim else 0))
    if isinstance(inner, Band):
        shift = {1: piece.start, 2: -piece.start}.get(dim, 0)
        if inner.documents is not None:
            return inner if dim > 2 and match.value(n).shape == match.value(n.args[0]).shape else None
        return Band(inner.low - shift, inner.high - shift, inner.inside, inner.outside)
    return None


def _sum(n: fx.Node, of) -> Meaning:
    a, b = (of(x) for x in n.args[:2])
    if n.target in (aten.rsub.Scalar, aten.rsub.Tensor):
        a, b = b, a
    sign = 1 if n.target in match.ADD else -1
    if isinstance(a, Index) and isinstance(b, Index) and sign == -1 and {a.dim, b.dim} == {1, 2}:
        return Distance(1 if a.dim == 1 else -1, a.offset - b.offset)
    if isinstance(a, Distance) and isinstance(b, (int, float)):
        return Distance(a.factor, a.offset + sign * b, a.absolute)
    if isinstance(b, Distance) and isinstance(a, (int, float)):
        return Distance(sign * b.factor, a + sign * b.offset, b.absolute)
    if isinstance(a, Index) and isinstance(b, int):
        return Index(a.dim, a.offset + sign * b)
    if isinstance(b, Index) and isinstance(a, int) and sign == 1:
        return Index(b.dim, a + b.offset)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a + sign * b
    if (
        isinstance(a, Band)
        and isinstance(b, Band)
        and sign == 1
        and a.inside == b.inside == 0
        and max(a.outside, b.outside) <= BLOCKED
    ):
        return a.meets(b)
    if isinstance(a, Band) and isinstance(b, (int, float)):
        return a.valued(a.inside + sign * b, a.outside + sign * b)
    if isinstance(b, Band) and isinstance(a, (int, float)):
        return b.valued(a + sign * b.inside, a + sign * b.outside)
    return None


def _product(n: fx.Node, of) -> Meaning:
    a, b = (of(x) for x in n.args[:2])
    if isinstance(b, Band):
        a, b = b, a
    for x, c in ((a, b), (b, a)):
        if isinstance(x, Distance) and isinstance(c, (int, float)):
            return Distance(c * x.factor, c * x.offset, x.absolute) if c else 0
    if isinstance(a, Band) and isinstance(b, (int, float)):
        return a.valued(a.inside * b, a.outside * b)
    if isinstance(a, Band) and isinstance(b, Band) and not a.outside and not b.outside:
        met = a.meets(b)  # zero outside of either
        return met and met.valued(a.inside * b.inside, 0)
    return None


def _compare(n: fx.Node, of) -> Meaning:
    """row index compared with column index: a half plane of j - i."""
    a, b = (of(x) for x in n.args[:2])
    name = n.target._schema.name.split("::")[1]
    if isinstance(a, Index) and isinstance(b, Index) and {a.dim, b.dim} == {1, 2}:
        if a.dim == 2:  # i ? j is the mirrored comparison of j and i
            a, b, name = b, a, {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}.get(name, name)
        shift = b.offset - a.offset  # j + a.offset ? i + b.offset
        low = {"ge": shift, "gt": shift + 1, "eq": shift, "ne": shift}.get(name, -math.inf)
        high = {"le": shift, "lt": shift - 1, "eq": shift, "ne": shift}.get(name, math.inf)
        return Band(low, high, name != "ne", name == "ne")
    test = getattr(operator, name)
    if isinstance(a, Distance) and isinstance(b, (int, float)) and name not in ("eq", "ne"):
        return compare_distance(a, name, b)
    if isinstance(a, Band) and isinstance(b, (int, float)):
        return a.valued(test(a.inside, b), test(a.outside, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return test(a, b)  # before documents: numbers that are all the same keep nothing apart
    if name in ("eq", "ne") and (documents := find_sequence_ids(n, of)) is not None:
        return Band(-math.inf, math.inf, name == "eq", name == "ne", documents)
    return None


def _difference(n: fx.Node, of) -> Meaning:
    """``diff`` of positions along their own dimension is 1 everywhere, if what is prepended continues them."""
    inner, before = of(n.args[0]), of(match.argument(n, "prepend"))
    along = match.argument(n, "dim", -1) % match.rank(n) - match.value(n).dim()
    plain = match.argument(n, "n", 1) == 1 and match.argument(n, "append") is None
    if plain and isinstance(inner, Index) and along == -inner.dim:
        return 1 if match.argument(n, "prepend") is None or before == inner.offset - 1 else None
    return None


def _running_sum(n: fx.Node, of) -> Meaning:
    return 0 if of(n.args[0]) == 0 else None


def _gather(n: fx.Node, of) -> Meaning:
    """A table of positions read at positions: the index of the dimension along which the table counts."""
    inner, indices = of(n.args[0]), n.args[1]
    if isinstance(inner, Index) and len(indices) == match.value(n.args[0]).dim() and None not in indices:
        at = of(indices[-inner.dim])
        return Index(at.dim, at.offset + inner.offset) if isinstance(at, Index) else None
    return inner if isinstance(inner, (int, float)) else None


def _triangle(n: fx.Node, of) -> Meaning:
    inner, diagonal = of(n.args[0]), match.argument(n, "diagonal", 0)
    if not isinstance(diagonal, int):
        return None
    low, high = (diagonal, math.inf) if n.target is aten.triu.default else (-math.inf, diagonal)
    if isinstance(inner, Band) and not inner.outside:
        return inner.meets(Band(low, high, True, False))
    return Band(low, high, inner, 0) if isinstance(inner, (int, float)) else None


def _not(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    return inner.valued(not inner.inside, not inner.outside) if isinstance(inner, Band) else None


def _absolute(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    if isinstance(inner, Distance) and inner.offset == 0:
        return Distance(abs(inner.factor), 0, True)
    return abs(inner) if isinstance(inner, (int, float)) else None


def _read_neg(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    if isinstance(inner, Distance):
        return Distance(-inner.factor, -inner.offset, inner.absolute)
    return -inner if isinstance(inner, (int, float)) else None


def _and(n: fx.Node, of) -> Meaning:
    a, b = (of(x) for x in n.args[:2])
    for x, y in ((a, b), (b, a)):
        if isinstance(x, (bool, int)) and match.value(n).dtype == torch.bool:
            return y if x else False
    bands = [
        x if isinstance(x, Band) and x.inside and not x.outside else x and isinstance(x, Band) and complement(x)
        for x in (a, b)
    ]
    if all(isinstance(x, Band) and x.inside and not x.outside for x in bands):
        return bands[0].meets(bands[1])
    return None


def _or(n: fx.Node, of) -> Meaning:
    """Blocked here or there: not inside of either."""
    a, b = (of(x) for x in n.args[:2])
    for x, y in ((a, b), (b, a)):
        if isinstance(x, (bool, int)) and match.value(n).dtype == torch.bool:
            return True if x else y
    bands = [
        x if isinstance(x, Band) and x.outside and not x.inside else x and isinstance(x, Band) and complement(x)
        for x in (a, b)
    ]
    if all(isinstance(x, Band) and x.outside and not x.inside for x in bands):
        return bands[0].meets(bands[1])
    return None


def _where(n: fx.Node, of) -> Meaning:
    condition, a, b = (of(x) for x in n.args)
    plain = isinstance(condition, Band) and isinstance(a, (int, float)) and isinstance(b, (int, float))
    return condition.valued(a if condition.inside else b, a if condition.outside else b) if plain else None


def _masked_fill(n: fx.Node, of) -> Meaning:
    base, condition, fill = (of(x) for x in n.args)
    if isinstance(condition, Band) and isinstance(fill, (int, float)):
        if isinstance(base, (int, float)):
            return condition.valued(fill if condition.inside else base, fill if condition.outside else base)
        if isinstance(base, Band) and (base.low, base.high, base.documents) == (
            condition.low,
            condition.high,
            condition.documents,
        ):
            return base.valued(fill if condition.inside else base.inside, fill if condition.outside else base.outside)
    return None


_HANDLERS = {
    **dict.fromkeys((aten.arange.default, aten.arange.start), _arange),
    **dict.fromkeys(
        (
            aten.ones.default,
            aten.zeros.default,
            aten.full.default,
            aten.scalar_tensor.default,
            aten.ones_like.default,
            aten.zeros_like.default,
            aten.full_like.default,
            aten.new_ones.default,
            aten.new_zeros.default,
            aten.new_full.default,
        ),
        _constant,
    ),
    **dict.fromkeys(
        (aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.to.device),
        _same_value,
    ),
    aten.lift_fresh_copy.default: _written_down,
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout), _cast),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, *match.RESHAPES), _read_view),
    **dict.fromkeys((aten.fill.Scalar, aten.fill.Tensor), _read_full),
    aten.expand.default: _expand,
    aten.diff.default: _difference,
    aten.abs.default: _absolute,
    aten.neg.default: _read_neg,
    aten.cumsum.default: _running_sum,
    aten.index.Tensor: _gather,
    aten.slice.Tensor: _slice,
    **dict.fromkeys((*match.ADD, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar), _sum),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _product),
    **dict.fromkeys(
        (getattr(getattr(aten, c), o) for c in ("le", "lt", "ge", "gt", "eq", "ne") for o in ("Tensor", "Scalar")),
        _compare,
    ),
    **dict.fromkeys((aten.triu.default, aten.tril.default), _triangle),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _not),
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor), _and),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor), _or),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _where),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _masked_fill),
}
