"""What a dimension of a padded value consists of: axes with a true and a stored size (:mod:`padded`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Sequence


@dataclass(frozen=True)
class Axis:
    """A dimension, or one of those that were flattened to it."""

    size: int
    stored: int
    """With the padding at its end."""
    blank: bool = field(default=False, compare=False)
    """Whether the padding is that of a parameter, and may have zeros where the model has none."""


Axes = tuple[Axis, ...]
"""Of one dimension, outermost first."""


def is_padded_axes(axes: Axes) -> bool:
    return any(a.size != a.stored for a in axes)


def plain(size: int) -> Axes:
    """A dimension without padding."""
    return (Axis(size, size),)


def stored_size(axes: Axes) -> int:
    return math.prod(a.stored for a in axes)


def regrouped(axes: Sequence[Axis], shape: Sequence[int]) -> list[Axes] | None:
    """``axes`` one behind the other as dimensions of these sizes; None: a padded one would be parted."""
    rest, dims = [a for a in axes if a.stored != 1], []
    for size in shape:
        own: list[Axis] = []
        while math.prod(a.size for a in own) < size:
            if not rest:
                return None
            missing, axis = size // math.prod(a.size for a in own), rest.pop(0)
            if axis.size > missing:
                if axis.size != axis.stored or axis.size % missing:
                    return None
                rest.insert(0, Axis(axis.size // missing, axis.size // missing))
                axis = Axis(missing, missing)
            own.append(axis)
        if math.prod(a.size for a in own) != size:
            return None
        dims.append(joined_plain(own) or plain(1))
    return dims if not any(a.size != 1 or a.stored != 1 for a in rest) else None


def joined_plain(axes: Sequence[Axis]) -> Axes:
    """Neighbours without padding as one."""
    result: list[Axis] = []
    for a in axes:
        if result and a.size == a.stored and result[-1].size == result[-1].stored:
            result[-1] = Axis(result[-1].size * a.size, result[-1].size * a.size)
        else:
            result.append(a)
    return tuple(result)
