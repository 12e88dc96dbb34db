"""Factors of what is computed for all chunks of a gated delta rule at once.

A value [batch, heads, chunks, tokens, ...] is read as a number times rows [batch, heads, seq, width], columns [batch,
heads, seq] and exponentials of the running sum c of the gates, through padding and division into chunks, in any
association: ``(k * beta) * e^c`` and ``k * (beta * e^c)`` are the same.
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


def factors(n: Any) -> Factors:
    """Of ``n``, whose chunks are dimension 2.

    Raises:
        Miss: part of it is nothing that the chunks of a gated delta rule are made of.
    """
    if (scaled := match.unscale(n))[1] != 1.0:
        number, inside = factors(scaled[0])
        return number * scaled[1], inside
    if match.is_call(n, aten.mul.Tensor) and normal(n) is None:
        a, b = n.args
        if _broadcast_by_rows(a, b):
            (x, left), (y, right) = factors(a), factors(b)
            return x * y, left + right
    if match.is_call(n, aten.matmul.default) and match.value(n).dim() == 5:
        other = transposed(n.args[1])
        if other is not None:
            (x, left), (y, right) = factors(n.args[0]), factors(other)
            return x * y, left + [(ACROSS if what == ROW else f"{what} across", node) for what, node in right]
    if match.is_call(n, aten.exp.default):
        return 1.0, [exponential(n.args[0])]
    inner = _before_chunks(n)
    if inner is not None:
        return factors(inner)
    dims = match.value(n).dim() if match.is_float(n) else 0
    if dims not in (3, 4):
        raise Miss(f"{getattr(n, 'name', n)} is no product of rows, of numbers for each row and of decays")
    return 1.0, [(ROW if dims == 4 else COLUMN, n)]


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


def exponential(n: Any) -> tuple[str, Any]:
    """What exp is taken of."""
    if match.is_call(n, aten.cumsum.default):
        return SUM, n
    if (last := _last(n)) is not None:
        return LAST, last
    if match.is_call(n, aten.masked_fill.Scalar) and n.args[2] == float("-inf"):
        return PAIRS, _differences(n)
    if match.is_call(n, aten.sub.Tensor) and match.is_call(n.args[1], aten.cumsum.default):
        last = _last(n.args[0])
        if last is n.args[1] and match.value(n.args[0]).dim() == match.value(last).dim():
            return REST, last
    raise Miss(f"{getattr(n, 'name', n)} is no decay between two tokens of a chunk")


def _differences(n: fx.Node) -> Any:
    """c when ``n`` is c_i - c_j, minus infinity above the diagonal."""
    difference, mask, _ = n.args
    band = meaning(mask)
    if not isinstance(band, Band) or (band.low, band.high, band.documents) not in (
        (1, float("inf"), None),
        (float("-inf"), 0, None),
    ):
        raise Miss(f"the mask {mask.name} of the decays is not what a chunk may not see")
    blocked = band.inside if band.low == 1 else band.outside
    if not blocked or (band.outside if band.low == 1 else band.inside):
        raise Miss(f"the mask {mask.name} of the decays is not what a chunk may not see")
    if match.is_call(difference, aten.sub.Tensor):
        rows, columns = difference.args[:2]
        dims = [
            x.args[1] % match.rank(x) if match.is_call(x, aten.unsqueeze.default) else None for x in (rows, columns)
        ]
        if dims == [4, 3] and rows.args[0] is columns.args[0] and match.is_call(rows.args[0], aten.cumsum.default):
            return rows.args[0]
    raise Miss(f"{difference.name} is not a difference of the decays of two tokens")


def _last(n: Any) -> Any:
    """c when ``n`` is the running sum c at the end of each chunk."""
    while match.is_call(n, aten.unsqueeze.default):
        n = n.args[0]
    if match.is_call(n, aten.select.int) and match.is_call(n.args[0], aten.cumsum.default):
        c, dim, at = n.args
        size = match.value(c).shape[3]
        return c if dim % 4 == 3 and at % size == size - 1 else None
    if match.is_call(n, aten.slice.Tensor) and match.is_call(n.args[0], aten.cumsum.default):
        piece = match.part(n)
        if piece is not None and piece.dim == 3 and piece.start == match.value(piece.source).shape[3] - 1:
            return piece.source
    return None


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
    """``n`` before it was divided into chunks, padded with zeros after the last token, or given a last dimension of
    one; None when it is none of these."""
    if match.is_call(n, aten.unsqueeze.default):
        return n.args[0] if n.args[1] % match.rank(n) == match.rank(n) - 1 else None
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
