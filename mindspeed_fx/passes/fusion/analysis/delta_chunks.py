"""Factors of what is computed for the chunks of a delta rule, for all of them at once or one by one.

A value [batch, heads, chunks, tokens, ...] is read as a number times rows [batch, heads, seq, width], columns [batch,
heads, seq] and exponentials of the running sum c of the gates, through padding and division into chunks, in any
association: ``(k * beta) * e^c`` and ``k * (beta * e^c)`` are the same. So is what is computed of chunk i of such
values alone, [batch, heads, tokens, ...]. Gates are columns, or rows: one for each channel.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from mindspeed_fx.compat import symbols
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import Miss
from mindspeed_fx.passes.fusion.analysis.bands import Band
from mindspeed_fx.passes.fusion.analysis.positions import meaning

ROW, COLUMN, ACROSS = "row", "column", "across"
"""A factor by row of a chunk, one number for each row, and a factor by column of a product x y^T."""

SUM, REST, LAST, PAIRS = "e^c", "e^(c_C - c)", "e^c_C", "e^(c_i - c_j)"
"""What a running sum c of gates is exponentiated as: c, what remains to the last of a chunk, the last, differences at
i >= j."""

Factors = tuple[float, list[tuple[str, Any]]]
"""A number; what each factor is, and the node that it is of (the running sum's for exponentials)."""


def factors(n: Any, chunk: int | None = None) -> Factors:
    """Of ``n``, whose chunks are dimension 2, or which is computed for ``chunk`` alone; told as of all chunks.

    Raises:
        Miss: part of it is nothing that the chunks of a delta rule are made of.
    """
    if (whole := of_all_chunks(n, chunk)) is not None:
        return factors(whole)
    if (scaled := match.unscale(n))[1] != 1.0:
        number, inside = factors(scaled[0], chunk)
        return number * scaled[1], inside
    if match.is_call(n, aten.mul.Tensor) and normal(n) is None:
        a, b = n.args
        if _broadcast_by_rows(a, b):
            return _times(factors(a, chunk), factors(b, chunk))
    if match.is_call(n, aten.matmul.default) and match.rank(n) == _tokens(chunk) + 2:
        other = transposed(n.args[1])
        if other is not None:
            return _times(factors(n.args[0], chunk), _across(factors(other, chunk)))
    if match.is_call(n, aten.sum.dim_IntList) and (pairs := _summed_pairs(n, chunk)) is not None:
        return pairs
    if match.is_call(n, aten.masked_fill.Scalar) and n.args[2] == 0:
        number, inside = factors(n.args[0], chunk)
        if not _hides_later(n.args[1]):
            raise Miss(f"the mask {n.args[1].name} of pairs of tokens is not what a chunk may not see")
        if PAIRS in dict(inside):  # zero there already
            return number, inside
    if match.is_call(n, aten.exp.default):
        return 1.0, [exponential(n.args[0], chunk)]
    if _is_last_unsqueezed(n):
        return factors(n.args[0], chunk)
    inner = _before_chunks(n) if chunk is None else None
    if inner is not None:
        return factors(inner)
    dims = match.value(n).dim() if match.is_float(n) and chunk is None else 0
    if dims not in (3, 4):
        raise Miss(f"{getattr(n, 'name', n)} is no product of rows, of numbers for each row and of decays")
    return 1.0, [(ROW if dims == 4 else COLUMN, n)]


def of_all_chunks(n: Any, chunk: int | None) -> Any:
    """x when ``n`` is ``chunk`` of x; None where it is none, or a token of a chunk."""
    piece = chunk_of(n) if chunk is not None else None
    if piece is None or piece[1] != chunk or (chunk_of(piece[0]) or (None, None))[1] == chunk:
        return None
    return piece[0]


def _tokens(chunk: int | None) -> int:
    """The dimension of a chunk's tokens."""
    return 3 if chunk is None else 2


def _times(a: Factors, b: Factors) -> Factors:
    return a[0] * b[0], a[1] + b[1]


def _across(x: Factors) -> Factors:
    return x[0], [(ACROSS if what == ROW else f"{what} across", node) for what, node in x[1]]


def _summed_pairs(n: fx.Node, chunk: int | None) -> Factors | None:
    """Of x y^T where every channel has a decay of its own: ``(x[..., None, :] * y[..., None, :, :] * e^(c_i -
    c_j)).sum(-1)``; None when ``n`` is another sum."""
    product, dims = n.args[:2]
    rank, tokens = match.rank(product), _tokens(chunk)
    if [d % rank for d in dims] != [rank - 1] or match.argument(n, "keepdim") or rank != tokens + 3:
        return None
    result: Factors = (1.0, [])
    for x in _multiplied(product):
        dim = x.args[1] % rank if match.is_call(x, aten.unsqueeze.default) else None
        if dim in (tokens, tokens + 1):
            inside = factors(x.args[0], chunk)
            result = _times(result, inside if dim == tokens + 1 else _across(inside))
        else:
            inside = factors(x, chunk)
            if [what for what, _ in inside[1]] != [PAIRS]:
                raise Miss(f"{x.name} is no decay between two tokens of a chunk")
            result = _times(result, inside)
    return result


def _multiplied(n: Any) -> list[Any]:
    return [x for a in n.args for x in _multiplied(a)] if match.is_call(n, aten.mul.Tensor) else [n]


def normal(n: Any) -> tuple[fx.Node, float] | None:
    """(x, eps) when ``n`` is x / sqrt(sum(x^2) + eps) over the last dimension."""
    for x, root in match.operands(n, *match.MUL):
        inside = match.plus_number(match.inverse_root(root))
        if inside is not None and match.is_call(inside[0], aten.sum.dim_IntList):
            squares, dims = inside[0].args[:2]
            if match.argument(inside[0], "keepdim") and [d % match.rank(squares) for d in dims] == [
                match.rank(squares) - 1
            ]:
                square = match.match_square(squares)
                if square is not None and match.same(square, x):
                    return x, inside[1]
    return None


def exponential(n: Any, chunk: int | None = None) -> tuple[str, Any]:
    """What exp is taken of."""
    if (c := _running_sum(n.args[0] if _is_last_unsqueezed(n) else n, chunk)) is not None:
        return SUM, c
    if (c := _last(n, chunk)) is not None:
        return LAST, c
    if match.is_call(n, aten.masked_fill.Scalar) and n.args[2] == float("-inf"):
        return PAIRS, _differences(n, chunk)
    if match.is_call(n, aten.sub.Tensor):
        last, c = _last(n.args[0], chunk), _running_sum(n.args[1], chunk)
        if c is not None and last is c and match.rank(n.args[0]) == match.rank(n.args[1]):
            return REST, c
    raise Miss(f"{getattr(n, 'name', n)} is no decay between two tokens of a chunk")


def _running_sum(n: Any, chunk: int | None) -> fx.Node | None:
    """c when ``n`` is it, or its ``chunk``."""
    whole = n if chunk is None else of_all_chunks(n, chunk)
    return whole if match.is_call(whole, aten.cumsum.default) else None


def _differences(n: fx.Node, chunk: int | None) -> Any:
    """c when ``n`` is c_i - c_j, minus infinity above the diagonal."""
    difference, mask, _ = n.args
    rows, columns = difference.args[:2] if match.is_call(difference, aten.sub.Tensor) else (None, None)
    dims = [x.args[1] % match.rank(x) if match.is_call(x, aten.unsqueeze.default) else None for x in (rows, columns)]
    tokens = _tokens(chunk)
    c = None
    if dims == [tokens + 1, tokens] and rows.args[0] is columns.args[0]:
        c = _running_sum(rows.args[0], chunk)
    if c is None:
        raise Miss(f"{difference.name} is not a difference of the decays of two tokens")
    if match.rank(c) == 5 and _is_last_unsqueezed(mask):
        mask = mask.args[0]
    if not _hides_later(mask):
        raise Miss(f"the mask {mask.name} of the decays is not what a chunk may not see")
    return c


def _hides_later(mask: Any) -> bool:
    """Whether ``mask`` is True where the column is a later token than the row, and only there."""
    band = meaning(mask)
    if not isinstance(band, Band) or band.documents is not None:
        return False
    if (band.low, band.high) == (1, float("inf")):
        return bool(band.inside and not band.outside)
    return (band.low, band.high) == (float("-inf"), 0) and bool(band.outside and not band.inside)


def _last(n: Any, chunk: int | None) -> Any:
    """c when ``n`` is the running sum c at the end of each chunk."""
    while match.is_call(n, aten.unsqueeze.default):
        n = n.args[0]
    if match.is_call(n, aten.select.int):
        source, dim, at = n.args
        start, step = at % match.value(source).shape[dim], 1
    elif match.is_call(n, aten.slice.Tensor) and (piece := match.part(n)) is not None:
        source, dim, start, step = piece.source, piece.dim, piece.start, piece.step
    else:
        return None
    c = _running_sum(source, chunk)
    if c is None or dim % match.rank(source) != _tokens(chunk) or step != 1:
        return None
    return c if start == match.value(source).shape[dim] - 1 else None


def transposed(n: Any) -> Any:
    """x when ``n`` is x with its last two dimensions exchanged."""
    if match.is_call(n, aten.transpose.int):
        dims = match.value(n).dim()
        return n.args[0] if {d % dims for d in n.args[1:]} == {dims - 1, dims - 2} else None
    return n.args[0] if match.is_call(n, aten.mT.default) else None


def chunk_of(n: Any) -> tuple[Any, int] | None:
    """(x, i) when ``n`` is chunk i of x [batch, heads, chunks, ...]."""
    return (
        (n.args[0], n.args[2]) if match.is_call(n, aten.select.int) and n.args[1] % match.rank(n.args[0]) == 2 else None
    )


def _broadcast_by_rows(a: Any, b: Any) -> bool:
    """Whether a and b have the same dimensions but for a last one of one."""
    x, y = match.value(a).shape, match.value(b).shape
    return len(x) == len(y) and symbols.are_known_equal(x[:-1], y[:-1])


def _before_chunks(n: Any) -> Any:
    """``n`` before it was divided into chunks or padded with zeros after the last token; None when it is neither."""
    if match.is_call(n, *match.RESHAPES):
        new, old = list(match.value(n).shape), list(match.value(n.args[0]).shape)
        chunked = len(new) > 4 or len(old) == 3
        merged = [*new[:2], new[2] * new[3], *new[4:]] if chunked and len(new) >= 4 else None
        return n.args[0] if merged is not None and symbols.are_known_equal(old, merged) else None
    if match.is_call(n, aten.pad.default):
        widths, mode, fill = (match.argument(n, name) for name in ("pad", "mode", "value"))
        ahead = [0, 0] if match.rank(n) == 4 else []
        zeros = mode in (None, "constant") and not fill
        return n.args[0] if zeros and match.rank(n) in (3, 4) and list(widths[:-1]) == [*ahead, 0] else None
    return None


def _is_last_unsqueezed(n: Any) -> bool:
    """Whether ``n`` was given a last dimension of one."""
    return match.is_call(n, aten.unsqueeze.default) and n.args[1] % match.rank(n) == match.rank(n) - 1
