"""What ranks cannot share evenly: refused, or, where the plan says ``keep_whole``, padded or kept whole, and named."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

from torch.distributed.tensor import Placement, Replicate, Shard

from mindspeed_fx.compat import packed_shards
from mindspeed_fx.compat.dtensor import is_strided
from mindspeed_fx.compat.fake import hint
from mindspeed_fx.sharding.plan import ShardingError

logger = logging.getLogger(__name__)


@dataclass
class KeptWhole:
    """Of one program."""

    allowed: bool
    reasons: list[str] = field(default_factory=list)
    """In the order in which they were met, each once."""
    where: str = ""
    """What runs: module and line."""
    pads: bool = True
    """Whether values may be padded."""
    paddings: dict[str, list[str]] = field(default_factory=dict)
    """What was padded, in words -> where."""

    def note(self, reason: str) -> None:
        """Keep ``reason``, without the advice behind its semicolon; a new one is logged."""
        text = reason.partition(";")[0]
        if text not in self.reasons:
            self.reasons.append(text)
            logger.warning("kept whole: %s", text)

    def note_padding(self, text: str, where: str) -> None:
        """Keep that ``text`` is so at ``where``; what is new is logged."""
        if text not in self.paddings:
            logger.info("padded: %s: %s", where, text)
        places = self.paddings.setdefault(text, [])
        if where not in places:
            places.append(where)

    @property
    def padded(self) -> list[str]:
        """What was padded and what that costs, each once, with the first place of it."""
        return [
            f"{places[0]}: {text}" + (f"; and {len(places) - 1} more" if len(places) > 1 else "")
            for text, places in self.paddings.items()
        ]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """:func:`keep_whole` speaks to this one."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


_current: contextvars.ContextVar[KeptWhole | None] = contextvars.ContextVar("kept_whole", default=None)


def keep_whole(error: ShardingError) -> None:
    """Note that what ``error`` is about stays whole.

    Raises:
        ShardingError: ``error`` itself, where the plan does not allow it.
    """
    current = _current.get()
    if current is None or not current.allowed:
        raise error
    current.note(f"{current.where}: {error}" if current.where else str(error))


def note(reason: str) -> None:
    """Note that what runs is whole, and why."""
    if (current := _current.get()) is not None:
        current.note(f"{current.where}: {reason}" if current.where else reason)


def may_pad() -> bool:
    """Whether the program that runs may pad what its ranks cannot share evenly."""
    current = _current.get()
    return current is not None and current.allowed and current.pads


def note_padding(size: int, stored: int, ranks: int, names: Sequence[str], where: str = "") -> None:
    """Note that ``size`` elements are stored as ``stored``, for so many ranks of the mesh dimensions ``names``."""
    if (current := _current.get()) is not None:
        size, stored = hint(size), hint(stored)
        over = ", ".join(f'"{name}"' for name in names)
        text = f"{size} elements padded to {stored} for {ranks} ranks of {over} (+{(stored - size) / size:.1%})"
        current.note_padding(text, where or current.where)


def evenly_divided(shape: Sequence[int], placements: Sequence[Placement], mesh: Any) -> tuple[Placement, ...]:
    """``placements`` without those parts of a dimension that the ranks cannot share evenly; outer mesh dimensions come
    first.
    """
    results: list[Placement] = []
    for i, p in enumerate(placements):
        outer = math.prod(mesh.size(j) for j, q in enumerate(results) if isinstance(q, Shard) and q == p)
        uneven = isinstance(p, Shard) and shape[p.dim] % (outer * mesh.size(i)) != 0
        uneven |= any(n % mesh.size(i) for n in (packed_shards.pieces_of(p, shape[p.dim]) if is_strided(p) else ()))
        results.append(Replicate() if uneven else p)
    return tuple(results)
