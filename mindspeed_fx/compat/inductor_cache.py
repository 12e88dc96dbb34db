"""Part of :mod:`mindspeed_fx.compat`: the folder of Inductor's compiled code, and who writes into it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import tempfile
import warnings
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.private_files import distrust, make_private, process_folder


@contextlib.contextmanager
def compiled_once(gm: fx.GraphModule, inputs: Sequence[Any], shared: bool = True) -> Iterator[None]:
    """Processes of one machine that compile one graph do so one after the other: the first compiles, and the others
    find its result in the cache. Without a lock all compile it at once.

    Other graphs are not waited for, nor is a process that died; after ``WAIT`` seconds a graph is compiled all the
    same.

    Args:
        shared: whether others may compile it; False: nothing is locked.
    """
    from torch.utils._filelock import FileLock

    if not shared:
        yield
        return
    shown = [f"{x.dtype} {tuple(x.shape)} {x.stride()} {x.device}" if torch.is_tensor(x) else str(x) for x in inputs]
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    calls = [f"{n.op} {n.target} {n.args} {n.kwargs}" for graph in graphs for n in graph.nodes]
    text = "\n".join([*calls, *shown])
    folder = os.path.join(cache_directory(), "mindspeed_fx-once")
    os.makedirs(folder, exist_ok=True)
    lock: Any = FileLock(os.path.join(folder, f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.lock"), timeout=WAIT)
    try:
        lock.acquire()
    except TimeoutError:
        lock = None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def each_once(lower: Callable[[fx.GraphModule], Callable], shared: bool) -> Callable[[fx.GraphModule], Callable]:
    """``lower``, a compiler of graphs whose inputs are said by their nodes, with :func:`compiled_once` around each."""

    def run(gm: fx.GraphModule) -> Callable:
        inputs = [n.meta.get("val") for n in gm.graph.nodes if n.op == "placeholder"]
        with compiled_once(gm, inputs, shared):
            return lower(gm)

    return run


WAIT = 600.0
"""Seconds that a process waits for another one's compiler."""

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def cache_directory() -> str:
    """Where Inductor keeps compiled code; made where it is missing, if it can be."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    try:
        return cache_dir()
    except OSError:
        return os.environ[CACHE]


def written_libraries(key: str) -> list[pathlib.Path]:
    """Compiled files there of what Inductor's ``codecache`` calls ``key``."""
    return sorted(pathlib.Path(cache_directory(), key[1:3]).glob(f"{key}*.so"))


def leave_untrusted_cache() -> None:
    """Have Inductor keep its code in a folder of this process where its cache is somebody else's, or cannot be written
    into; a warning says so, once. Libraries and Python files are loaded from there by names that can be foretold.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    directory = cache_directory()
    reason = distrust(directory, is_named=directory != os.path.abspath(default_cache_dir())) or _unwritable(directory)
    if reason is None:
        return
    os.environ[CACHE] = str(make_private(process_folder() / "inductor"))
    warnings.warn(
        f"Inductor's cache is not used, and what is compiled is not kept: {reason}. {CACHE} names another directory",
        stacklevel=2,
    )


def _unwritable(directory: str) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        return f"{directory} cannot be written ({error.strerror})"
    return None
