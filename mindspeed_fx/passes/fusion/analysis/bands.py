"""What a value says of position (i, j): a position, a band around the diagonal, a distance from it; their algebra."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Union

import torch.fx as fx

from mindspeed_fx.graph import match

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


def complement(band: Band) -> Band | None:
    """The outside of a half plane is a half plane; the outside of a strip, or of documents, is no band."""
    if band.documents is not None:
        return None
    if band.low == -math.inf:
        return Band(band.high + 1, math.inf, band.outside, band.inside)
    return Band(-math.inf, band.low - 1, band.outside, band.inside) if band.high == math.inf else None


def compare_distance(a: Distance, name: str, bound: float) -> Band | None:
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
