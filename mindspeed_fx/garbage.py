"""Python's garbage collector while graphs are made."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Without the collector of cycles, which looks again and again through the millions of small objects that graphs
    are made of: a third of the time of tracing a deep model (benchmarks/first_step.py). What is not part of a cycle is
    freed as ever. Nothing happens where it is off already."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
