"""Which attention mask a subgraph builds: the band where attention is allowed, what masks a score, ones and zeros.

What the subgraph's values say of row i and column j: :mod:`mindspeed_fx.passes.fusion.analysis.positions`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat.symbols import statically_known_true
from mindspeed_fx.graph import match
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.fusion.analysis.bands import BLOCKED, Band, complement
from mindspeed_fx.passes.fusion.analysis.positions import meaning


def kept_band(n: fx.Node, kind: str) -> Band | None:
    """The band where attention is allowed, for a mask of ``kind`` "keep" (True: attend), "drop" (True: masked) or "add"
    (added to the scores); None when the mask is not a band."""
    band = meaning(n)
    if not isinstance(band, Band):
        return None
    if kind == "add":
        if band.inside == 0 and band.outside <= BLOCKED:
            return band
        return complement(band) if band.outside == 0 and band.inside <= BLOCKED else None
    allowed = band.inside if kind == "keep" else not band.inside
    blocked = band.outside if kind == "keep" else not band.outside
    if allowed and not blocked:
        return band
    return complement(band) if blocked and not allowed else None


def keeps_own_key(kind: str, m: fx.Node, where: fx.Node) -> bool:
    """Whether a mask that is applied at ``where`` certainly leaves every query the key of its own place."""
    band, shape = kept_band(m, kind), match.value(where).shape
    return band is not None and band.low <= 0 <= band.high and statically_known_true(shape[-1] == shape[-2])


def fill(n: Any) -> float | None:
    """The number that ``n`` sets elements to; None when that is not one known number."""
    number = match.number(n) if match.number(n) is not None else meaning(n)
    return number if isinstance(number, (int, float)) else None


def blocks(n: Any) -> bool:
    """Whether what is set to ``n`` is masked."""
    number = fill(n)
    return number is not None and number <= BLOCKED


def added(n: Any) -> float | None:
    """What a mask of known places adds to the scores that it hides; None where it is not known to hide any."""
    band = meaning(n)
    least = min(band.inside, band.outside) if isinstance(band, Band) else 0.0
    return float(least) if least <= BLOCKED else None


def binary(n: Any, depth: int = 12) -> bool:
    """Whether every element of ``n`` is certainly zero or one: it is boolean, made of booleans, or the graph builds it
    of nothing else.
    """
    if not isinstance(n, fx.Node) or not depth or n.meta.get("mutated"):
        return isinstance(n, (bool, int, float)) and n in (0, 1)
    if isinstance(match.value(n), torch.Tensor) and match.value(n).dtype == torch.bool:
        return True
    if match.is_call(n, *_KEEPING, *match.RESHAPES):
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
