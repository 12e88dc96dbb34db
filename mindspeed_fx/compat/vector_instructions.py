"""Which vector instructions Inductor writes for on a CPU, found out early: a part of :mod:`mindspeed_fx.compat`.

Inductor compiles a small file for each set of instructions that the processor has, loads it in a process of its own,
and asks when it writes the first kernel, for all sets, of which it takes the best: on a Xeon with AMX 11 files, 16 s
with an empty cache and 2.6 s with a full one (benchmarks/results/2026-11-30-first_step.txt). Here the best set alone is
tried, beside Dynamo's reading. What is found is the same.
"""

from __future__ import annotations

import collections.abc
import contextlib
import contextvars
import functools
import os
import platform
import sys
import threading
from typing import Any, Iterator

_lock = threading.RLock()
"""Trying a set changes the object that stands for it, for a while: one thread tries at a time."""


def _renew_lock() -> None:
    """In a fork, which has none of its parent's threads."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class _Valid(collections.abc.Sequence):
    """Those of some sets of instructions that the compiler, too, has: tried in turn, as far as they are asked for."""

    def __init__(self, candidates: list[Any]):
        self.candidates = candidates

    def __iter__(self) -> Iterator[Any]:
        for candidate in self.candidates:
            with _lock:
                is_valid = bool(candidate)
            if is_valid:
                yield candidate

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: Any) -> Any:
        return next(iter(self)) if index == 0 else list(self)[index]


@functools.cache
def try_the_best() -> None:
    """Have Inductor try the best set of instructions first, and others where that one is not there."""
    from torch._inductor import cpu_vec_isa

    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":  # others have one set
        return
    every = cpu_vec_isa.valid_vec_isa_list

    @functools.cache
    def valid_vec_isa_list() -> _Valid:
        flags = cpu_vec_isa.x86_isa_checker()
        return _Valid([isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= set(flags)])

    cpu_vec_isa.valid_vec_isa_list = functools.update_wrapper(valid_vec_isa_list, every)


def _find_out() -> None:
    from torch._inductor import cpu_vec_isa

    with contextlib.suppress(Exception):  # Inductor asks again, and tells
        cpu_vec_isa.pick_vec_isa()


@contextlib.contextmanager
def asked_early() -> Iterator[None]:
    """Within, a thread of its own finds out; who asks meanwhile waits for it. It is done at the end: what is compiled
    lies in a cache that the caller may remove."""
    try_the_best()
    settings = contextvars.copy_context()  # of Inductor, which are a thread's own
    asking = threading.Thread(target=settings.run, args=(_find_out,), name="mindspeed_fx_vectors")
    asking.start()
    try:
        yield
    finally:
        asking.join()
