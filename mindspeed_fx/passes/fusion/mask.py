"""Which attention mask a subgraph builds, by abstract interpretation instead of evaluation.

Masks are made of position indices: ``arange``, shifts, comparisons, ``triu`` and ``tril``, boolean logic, ``where``. A
value is described by what it says of row i and column j, so the answer holds for every size, symbolic ones included.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Union

import torch
import torch.fx as fx

from mindspeed_fx.passes.fusion import match
from mindspeed_fx.passes.fusion.match import aten

BLOCKED = -1e4  # Megatron masks with -10000; exp of it is zero in every float type next to an ordinary score


@dataclass(frozen=True)
class Index:
    """The position along dimension ``dim`` (counted from the end, 1 is the last) plus ``offset``."""

    dim: int
    offset: int


@dataclass(frozen=True)
class Band:
    """Inside where low <= j - i <= high, with the values ``inside`` and ``outside``."""

    low: float
    high: float
    inside: float
    outside: float

    def flip(self) -> "Band":
        return Band(self.low, self.high, self.outside, self.inside)


Meaning = Union[Index, Band, int, float, None]


CAUSAL = Band(-math.inf, 0, True, False)


def together(bands: list[Band | None]) -> Band | None:
    """Where all of ``bands`` that are known allow attention; None when none is known."""
    known = [b for b in bands if b is not None]
    return Band(max(b.low for b in known), min(b.high for b in known), True, False) if known else None


def is_causal(keep: Band | None) -> bool:
    """True when query i may attend exactly to keys 0..i."""
    return keep is not None and (keep.low, keep.high) == (-math.inf, 0)


def is_window(keep: Band | None) -> bool:
    """True when query i may attend exactly to a fixed number of keys that ends with its own."""
    return keep is not None and keep.high == 0 and -math.inf < keep.low <= 0


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
    """The outside of a half plane is a half plane; the outside of a strip is no band."""
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


def _arange(n: fx.Node, of) -> Meaning:
    start = n.args[0] if n.target is aten.arange.start else 0
    return Index(1, start) if isinstance(start, int) else None


def _constant(n: fx.Node, of) -> Meaning:
    if n.target in (aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default):
        return of(match.argument(n, "fill_value", n.args[0]))
    return 1 if "ones" in str(n.target) else 0


def _same_value(n: fx.Node, of) -> Meaning:
    return of(n.args[0])


def _cast(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    if isinstance(inner, Band) and match.value(n).dtype == torch.bool:
        return Band(inner.low, inner.high, bool(inner.inside), bool(inner.outside))
    return inner


def _moved(n: fx.Node, of) -> Meaning:
    """Unsqueeze, view, transpose ...: an index moves with the one dimension that is not 1; a band needs its last two."""
    inner, source = of(n.args[0]), n.args[0]
    if isinstance(inner, Index):
        if n.target is aten.unsqueeze.default:
            dim = n.args[1] % match.value(n).dim()
            return Index(inner.dim + (match.value(n).dim() - dim <= inner.dim), inner.offset)
        if n.target is aten.transpose.int:
            a, b = (match.value(n).dim() - d % match.value(n).dim() for d in n.args[1:])
            return Index({a: b, b: a}.get(inner.dim, inner.dim), inner.offset)
        before, after = _long_dims(source), _long_dims(n)
        return Index(after[0], inner.offset) if before == [inner.dim] and len(after) == 1 else None
    if isinstance(inner, Band):
        kept_last = match.value(n).shape[-2:] == match.value(source).shape[-2:] and n.target is not aten.transpose.int
        return inner if kept_last else None
    return inner


def _long_dims(n: fx.Node) -> list[int]:
    shape = match.value(n).shape
    return [len(shape) - d for d, size in enumerate(shape) if not (isinstance(size, int) and size == 1)]


def _expand(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    return inner if not isinstance(inner, Band) or match.value(n).shape[-2:] == match.value(n.args[0]).shape[-2:] else None


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
        return Band(inner.low - shift, inner.high - shift, inner.inside, inner.outside)
    return None


def _sum(n: fx.Node, of) -> Meaning:
    a, b = (of(x) for x in n.args[:2])
    if n.target in (aten.rsub.Scalar, aten.rsub.Tensor):
        a, b = b, a
    sign = 1 if n.target in match.ADD else -1
    if isinstance(a, Index) and isinstance(b, int):
        return Index(a.dim, a.offset + sign * b)
    if isinstance(b, Index) and isinstance(a, int) and sign == 1:
        return Index(b.dim, a + b.offset)
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return a + sign * b
    if isinstance(a, Band) and isinstance(b, (int, float)):
        return Band(a.low, a.high, a.inside + sign * b, a.outside + sign * b)
    if isinstance(b, Band) and isinstance(a, (int, float)):
        return Band(b.low, b.high, a + sign * b.inside, a + sign * b.outside)
    return None


def _product(n: fx.Node, of) -> Meaning:
    a, b = (of(x) for x in n.args[:2])
    if isinstance(b, Band):
        a, b = b, a
    if isinstance(a, Band) and isinstance(b, (int, float)):
        return Band(a.low, a.high, a.inside * b, a.outside * b)
    return None


def _compare(n: fx.Node, of) -> Meaning:
    """row index compared with column index: a half plane of j - i."""
    a, b = (of(x) for x in n.args[:2])
    name = n.target._schema.name.split("::")[1]
    if isinstance(a, Index) and isinstance(b, Index) and {a.dim, b.dim} == {1, 2}:
        if a.dim == 2:  # i ? j is the mirrored comparison of j and i
            a, b, name = b, a, {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt"}[name]
        shift = b.offset - a.offset  # j + a.offset ? i + b.offset
        low = {"ge": shift, "gt": shift + 1}.get(name, -math.inf)
        high = {"le": shift, "lt": shift - 1}.get(name, math.inf)
        return Band(low, high, True, False)
    test = getattr(operator, name)
    if isinstance(a, Band) and isinstance(b, (int, float)):
        return Band(a.low, a.high, test(a.inside, b), test(a.outside, b))
    return test(a, b) if isinstance(a, (int, float)) and isinstance(b, (int, float)) else None


def _difference(n: fx.Node, of) -> Meaning:
    """``diff`` of positions along their own dimension is 1 everywhere, if what is prepended continues them."""
    inner, before = of(n.args[0]), of(match.argument(n, "prepend"))
    along = match.argument(n, "dim", -1) % match.value(n).dim() - match.value(n).dim()
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
        return Band(max(low, inner.low), min(high, inner.high), inner.inside, inner.outside)
    return Band(low, high, inner, 0) if isinstance(inner, (int, float)) else None


def _not(n: fx.Node, of) -> Meaning:
    inner = of(n.args[0])
    return Band(inner.low, inner.high, not inner.inside, not inner.outside) if isinstance(inner, Band) else None


def _and(n: fx.Node, of) -> Meaning:
    a, b = (of(x) for x in n.args[:2])
    for x, y in ((a, b), (b, a)):
        if isinstance(x, (bool, int)) and match.value(n).dtype == torch.bool:
            return y if x else False
    if isinstance(a, Band) and isinstance(b, Band) and a.inside and b.inside and not a.outside and not b.outside:
        return Band(max(a.low, b.low), min(a.high, b.high), True, False)
    return None


def _where(n: fx.Node, of) -> Meaning:
    condition, a, b = (of(x) for x in n.args)
    plain = isinstance(condition, Band) and isinstance(a, (int, float)) and isinstance(b, (int, float))
    return Band(condition.low, condition.high, a if condition.inside else b, a if condition.outside else b) if plain else None


def _masked_fill(n: fx.Node, of) -> Meaning:
    base, condition, fill = (of(x) for x in n.args)
    if isinstance(condition, Band) and isinstance(fill, (int, float)):
        if isinstance(base, (int, float)):
            return Band(condition.low, condition.high, fill if condition.inside else base, fill if condition.outside else base)
        if isinstance(base, Band) and (base.low, base.high) == (condition.low, condition.high):
            return Band(base.low, base.high, fill if condition.inside else base.inside, fill if condition.outside else base.outside)
    return None


_HANDLERS = {
    **dict.fromkeys((aten.arange.default, aten.arange.start), _arange),
    **dict.fromkeys(
        (aten.ones.default, aten.zeros.default, aten.full.default, aten.scalar_tensor.default, aten.ones_like.default, aten.zeros_like.default,
         aten.full_like.default, aten.new_ones.default, aten.new_zeros.default, aten.new_full.default), _constant),
    **dict.fromkeys((aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default, aten.to.device), _same_value),
    **dict.fromkeys((aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout), _cast),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.dim, aten.transpose.int, *match.VIEWS), _moved),
    aten.expand.default: _expand,
    aten.diff.default: _difference,
    aten.cumsum.default: _running_sum,
    aten.index.Tensor: _gather,
    aten.slice.Tensor: _slice,
    **dict.fromkeys((*match.ADD, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Tensor, aten.rsub.Scalar), _sum),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _product),
    **dict.fromkeys((getattr(getattr(aten, c), o) for c in ("le", "lt", "ge", "gt", "eq", "ne") for o in ("Tensor", "Scalar")), _compare),
    **dict.fromkeys((aten.triu.default, aten.tril.default), _triangle),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _not),
    **dict.fromkeys((aten.logical_and.default, aten.bitwise_and.Tensor, getattr(aten, "__and__").Tensor), _and),
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar), _where),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), _masked_fill),
}  # fmt: skip
