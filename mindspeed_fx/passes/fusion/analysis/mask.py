"""Which attention mask a subgraph builds, by abstract interpretation instead of evaluation.

Masks are made of position indices: ``arange``, shifts, comparisons, ``triu`` and ``tril``, boolean logic, ``where``. A
value is described by what it says of row i and column j, so the answer holds for every size, symbolic ones included.
Numbers of documents, equal at row and column where attention is allowed, are a part of the answer.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten

BLOCKED = -1e4  # Megatron masks with -10000; exp of it is zero in every float type next to an ordinary score


@dataclass(frozen=True)
class Index:
    """The position along dimension ``dim`` (counted from the end, 1 is the last) plus ``offset``."""

    dim: int
    offset: int


@dataclass(frozen=True)
class Band:
    """Inside where low <= j - i <= high, and where i and j have the same number in ``documents``, [seq] or [batch,
    seq], if there are any; with the values ``inside`` and ``outside``."""

    low: float
    high: float
    inside: float
    outside: float
    documents: fx.Node | None = None

    def valued(self, inside: float, outside: float) -> "Band":
        """The same region with other values."""
        return Band(self.low, self.high, inside, outside, self.documents)

    def meets(self, other: "Band") -> "Band | None":
        """Where both are inside, with the values of this one; None when that is no band."""
        if (
            self.documents is not None
            and other.documents is not None
            and not match.same(self.documents, other.documents)
        ):
            return None
        return Band(
            max(self.low, other.low),
            min(self.high, other.high),
            self.inside,
            self.outside,
            self.documents if self.documents is not None else other.documents,
        )


@dataclass(frozen=True)
class Distance:
    """``factor`` times how far the column is ahead of the row, j - i or its absolute value, plus ``offset``."""

    factor: float
    offset: float
    absolute: bool = False


Meaning = Union[Index, Band, Distance, int, float, None]


CAUSAL = Band(-math.inf, 0, True, False)


def together(bands: list[Band | None]) -> Band | None:
    """Where all of ``bands`` that are known allow attention; None when none is known."""
    both = None
    for band in bands:
        if band is not None:
            both = band.valued(True, False) if both is None else both.meets(band)
            if both is None:
                return None
    return both


def is_causal(keep: Band | None) -> bool:
    """True when query i may attend exactly to keys 0..i."""
    return keep is not None and keep.documents is None and (keep.low, keep.high) == (-math.inf, 0)


def is_window(keep: Band | None) -> bool:
    """True when query i may attend exactly to a fixed number of keys that ends with its own."""
    return keep is not None and keep.documents is None and keep.high == 0 and -math.inf < keep.low <= 0


def kept(n: fx.Node, kind: str) -> Band | None:
    """The band where attention is allowed, for a mask of ``kind`` "keep" (True: attend), "drop" (True: masked) or "add"
    (added to the scores); None when the mask is not a band."""
    band = meaning(n)
    if not isinstance(band, Band):
        return None
    if kind == "add":
        if band.inside == 0 and band.outside <= BLOCKED:
            return band
        return _complement(band) if band.outside == 0 and band.inside <= BLOCKED else None
    allowed = band.inside if kind == "keep" else not band.inside
    blocked = band.outside if kind == "keep" else not band.outside
    if allowed and not blocked:
        return band
    return _complement(band) if blocked and not allowed else None


def _complement(band: Band) -> Band | None:
    """The outside of a half plane is a half plane; the outside of a strip, or of documents, is no band."""
    if band.documents is not None:
        return None
    if band.low == -math.inf:
        return Band(band.high + 1, math.inf, band.outside, band.inside)
    return Band(-math.inf, band.low - 1, band.outside, band.inside) if band.high == math.inf else None


def meaning(n: Any, depth: int = 40, known: dict[fx.Node, Meaning] | None = None) -> Meaning:
    """What ``n`` says of position (i, j); None when that cannot be told. Each node is looked at once (``known``)."""
    if isinstance(n, (bool, int, float)):
        return n
    known = {} if known is None else known
    if depth == 0 or not isinstance(n, fx.Node) or n.op != "call_function" or n.meta.get("mutated"):
        return None
    if n not in known:
        handler = _HANDLERS.get(n.target)
        known[n] = handler(n, lambda m: meaning(m, depth - 1, known)) if handler else None
    return known[n]


def fill(n: Any) -> float | None:
    """The number that ``n`` sets elements to; None when that is not one known number."""
    number = match.number(n) if match.number(n) is not None else meaning(n)
    return number if isinstance(number, (int, float)) else None


def blocks(n: Any) -> bool:
    """Whether what is set to ``n`` is masked."""
    number = fill(n)
    return number is not None and number <= BLOCKED


def binary(n: Any, depth: int = 12) -> bool:
    """Whether every element of ``n`` is certainly zero or one: it is boolean, made of booleans, or the graph builds it
    of nothing else.
    """
    if not isinstance(n, fx.Node) or not depth or n.meta.get("mutated"):
        return isinstance(n, (bool, int, float)) and n in (0, 1)
    if isinstance(match.value(n), torch.Tensor) and match.value(n).dtype == torch.bool:
        return True
    if match.is_call(n, *_KEEPING, *match.VIEWS):
        return binary(n.args[0], depth - 1)
    if match.is_call(n, aten.mul.Tensor) or (match.is_call(n, aten.rsub.Scalar, aten.sub.Tensor) and not n.kwargs):
        one = n.args[1] if n.target is aten.rsub.Scalar else n.args[0]
        return (n.target is aten.mul.Tensor or match.number(one) == 1) and all(binary(a, depth - 1) for a in n.args)
    known = meaning(n)
    return (
        {known.inside, known.outside} <= {0, 1}
        if isinstance(known, Band)
        else isinstance(known, (int, float)) and known in (0, 1)
    )


def _arange(n: fx.Node, of) -> Meaning:
    start = n.args[0] if n.target is aten.arange.start else 0
    return Index(1, start) if isinstance(start, int) else None


def _constant(n: fx.Node, of) -> Meaning:
    if n.target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default):
        return of(match.argument(n, "fill_value", n.args[0]))
    return 1 if "ones" in str(n.target) else 0


def _filled(n: fx.Node, of) -> Meaning:
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


def _moved(n: fx.Node, of) -> Meaning:
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
        before, after = _long_dims(source), _long_dims(n)
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


def _long_dims(n: fx.Node) -> list[int]:
    shape = match.value(n).shape
    return [len(shape) - d for d, size in enumerate(shape) if not (isinstance(size, int) and size == 1)]


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
        return _nearer(a, name, b)
    if isinstance(a, Band) and isinstance(b, (int, float)):
        return a.valued(test(a.inside, b), test(a.outside, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return test(a, b)  # before documents: numbers that are all the same keep nothing apart
    if name in ("eq", "ne") and (documents := _same_number(n, of)) is not None:
        return Band(-math.inf, math.inf, name == "eq", name == "ne", documents)
    return None


def _nearer(a: Distance, name: str, bound: float) -> Band | None:
    """factor * d + offset compared with ``bound``, as a band of d."""
    limit, strict = (bound - a.offset) / a.factor, name in ("lt", "gt")
    below = (name in ("lt", "le")) == (a.factor > 0)
    if a.absolute:
        # What is not below or at a limit is above it.
        reach = (
            (math.ceil(limit) - 1 if strict else math.floor(limit))
            if below
            else (math.floor(limit) if strict else math.ceil(limit) - 1)
        )
        return Band(-reach, reach, below, not below) if reach >= 0 else None
    high = math.ceil(limit) - 1 if strict else math.floor(limit)
    low = math.floor(limit) + 1 if strict else math.ceil(limit)
    return Band(-math.inf, high, True, False) if below else Band(low, math.inf, True, False)


def _same_number(n: fx.Node, of) -> fx.Node | None:
    """d when ``n`` compares d[i] with d[j], or their difference with zero, for integers d of one or two dimensions."""
    a, b = n.args[:2]
    if match.number(b) == 0 and match.is_call(a, aten.sub.Tensor) and not a.kwargs:
        a, b = a.args
    (x, i), (y, j) = (_numbers(m, of) for m in (a, b))
    return x if x is not None and y is not None and {i, j} == {1, 2} and match.same(x, y) else None


def _numbers(n: Any, of) -> tuple[fx.Node | None, int]:
    """(d, the dimension from the end along which it runs) when ``n`` is d, a number per token, laid along rows or
    columns.
    """
    if not isinstance(n, fx.Node) or not isinstance(match.value(n), torch.Tensor) or match.value(n).is_floating_point():
        return None, 0
    if match.is_call(n, aten.index.Tensor) and match.value(n).dim() >= 2:
        at = [of(i) if i is not None else None for i in n.args[1]]
        whole = len(at) == match.value(n.args[0]).dim() and all(isinstance(i, Index) and i.offset == 0 for i in at)
        rows = [match.value(i).shape[match.value(i).dim() - at[-1].dim] for i in n.args[1][-1:]] if whole else []
        if (
            whole
            and rows[0] == match.value(n.args[0]).shape[-1]
            and (len(at) == 1 or (len(at) == 2 and at[0].dim == 4))
        ):
            return n.args[0], at[-1].dim
        return None, 0
    dims = _long_dims(n)
    along = next((d for d in dims if d in (1, 2)), 0)
    if not along or any(d in (1, 2) for d in dims if d != along):
        return None, 0
    source = n
    while (
        match.value(source).dim() > 1
        and match.is_call(source, aten.unsqueeze.default, aten.transpose.int, aten.to.dtype, *match.VIEWS)
        and match.value(source.args[0]).dim() >= 1
    ):
        inner = source.args[0]
        if (
            match.is_call(source, aten.transpose.int)
            and match.value(source).shape[-2] != 1
            and match.value(source).shape[-1] != 1
        ):
            break
        if (
            match.value(inner).numel() != match.value(source).numel()
            or match.value(inner).is_floating_point()
            or match.value(inner).dim() > match.value(source).dim()
        ):
            break
        source = inner
    shape, whole = list(match.value(source).shape), list(match.value(n).shape)
    if (
        len(shape) > 2
        or shape[-1] != whole[-along]
        or (len(shape) == 2 and shape[0] != 1 and whole[0] != shape[0])
        or match.value(source).numel() != match.value(n).numel()
    ):
        return None, 0
    return source, along


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


def _negated(n: fx.Node, of) -> Meaning:
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
        x if isinstance(x, Band) and x.inside and not x.outside else x and isinstance(x, Band) and _complement(x)
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
        x if isinstance(x, Band) and x.outside and not x.inside else x and isinstance(x, Band) and _complement(x)
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


_KEEPING = (
    aten.to.dtype,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.transpose.int,
    aten.permute.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.triu.default,
    aten.tril.default,
)

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
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, *match.VIEWS), _moved),
    **dict.fromkeys((aten.fill.Scalar, aten.fill.Tensor), _filled),
    aten.expand.default: _expand,
    aten.diff.default: _difference,
    aten.abs.default: _absolute,
    aten.neg.default: _negated,
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
