"""Memory that a step on the host frees stays for the next step, where the C library is glibc.

glibc returns the free end of its heap to the system when it is larger than twice the largest block that it has seen
come back. The backward of a compiled step frees its saved tensors at once, and the next step asks for all of them
again, a page fault for each 4 KiB: 8 MiB of results take 4 ms more that way in a virtual machine (6.0 and 2.1 ms), and
a layer of experts has 1,500 to 3,000 faults a step (benchmarks/moe_gloo.py).
"""

from __future__ import annotations

import ctypes
import functools
import os

KEPT = 1 << 30
"""Bytes that may stay at the end of the heap."""
MAPPED = 32 << 20
"""Bytes of a block from which glibc maps it by itself: the largest value it takes, and its own choice with time."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Names of mallopt's settings in malloc.h."""


@functools.cache
def keep() -> bool:
    """Set so, once a process; False where the environment (MALLOC_TRIM_THRESHOLD_, GLIBC_TUNABLES) says something
    about malloc itself, or the C library is another.
    """
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, MAPPED) and library.mallopt(_TRIM_THRESHOLD, KEPT))
