"""Python's garbage collector while graphs are made."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Without the collector of cycles, which looks again and again through the millions of small objects that graphs
    are made of: a third of the time of tracing a deep model (benchmarks/first_step.py). What is not part of a cycle is
    freed as ever. Nothing happens where it is off already.

    Afterwards all objects count as old, so that those of the graphs, most of which are still in use then, are not
    looked through at once; what is garbage among them is freed by the next full collection (64 layers: 2 s less).
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        _grow_old()
        gc.enable()


def _grow_old() -> None:
    """Moves all objects to the oldest generation; not where a program has frozen some, which would be unfrozen.

    The collector counts frozen objects by walking over them, 35 ms for the million of torch's imports: a program that
    has some is not asked again.
    """
    global _has_frozen
    _has_frozen = _has_frozen or gc.get_freeze_count() > 0
    if not _has_frozen:
        gc.freeze()
        gc.unfreeze()


_has_frozen = False
