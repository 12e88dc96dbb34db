"""The one liveness walk: what is alive while each step of a schedule runs. Who lives from where to where is the
caller's knowledge.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Iterable


def curve(length: int, lives: Iterable[tuple[int, int, int]]) -> list[int]:
    """Bytes alive while each of ``length`` steps runs, in time linear in steps and lives.

    Args:
        lives: (bytes, first step, last step) of every block of memory; it is alive at both ends.
    """
    change = [0] * (length + 1)
    for size, first, last in lives:
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change[:length]))
