"""What ranks cannot share evenly: refused, or kept whole and named where the plan says ``keep_whole``."""

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

    def note(self, reason: str) -> None:
        """Keep ``reason``, without the advice behind its semicolon; a new one is logged."""
        text = reason.partition(";")[0]
        if text not in self.reasons:
            self.reasons.append(text)
            logger.warning("kept whole: %s", text)

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
