"""C++ kernels of our own, built by Inductor's C++ builder: a part of :mod:`mindspeed_fx.compat`.

Inductor knows the compiler, the OpenMP library that torch itself runs on, and where libraries are cached. A library is
one file whose name has the sha256 of what is in it, so that half a file, or a changed one, is built anew.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import tempfile
import time
from typing import Any, Callable, Iterator

import torch

from mindspeed_fx.compat import dispatcher, inductor_cache
from mindspeed_fx.private_files import make_private, process_folder, write_whole

log = logging.getLogger("mindspeed_fx")
SOURCES = pathlib.Path(__file__).parents[1] / "kernels" / "cpu"
_FLAGS = (
    "-O2",
    "-ftree-loop-vectorize",
    "-fvect-cost-model=dynamic",
    "-fno-math-errno",
    "-fno-signed-zeros",
    "-fno-trapping-math",
    "-ffp-contract=fast",
)
"""After Inductor's own, which they override: it writes vectors by hand, forbids the compiler to, and builds with -O3,
which takes three times as long here and runs no faster."""
_WIDE = ("-mprefer-vector-width=512",)


PATIENCE = 300.0
"""Seconds to wait for another process that builds the same library; then it is built twice."""

_builds: dict[str, concurrent.futures.Future] = {}
"""Compiler -> the library that it builds."""


def problem() -> str | None:
    """Why kernels in C++ cannot be built and fast here, or None."""
    return _processor_problem() or (None if _loaded() is not None else _compiler()[1])


@functools.cache
def _processor_problem() -> str | None:
    if capability() not in ("AVX2", "AVX512"):
        return f"oneDNN's small matrix product is for x86 with AVX2 or AVX-512; this processor has {capability()}"
    return None if torch.backends.mkldnn.is_available() else "this torch has no oneDNN"


def capability() -> str:
    """The instruction set that ATen's kernels use here: "AVX512", "AVX2", "DEFAULT" or another architecture's."""
    return torch.backends.cpu.get_cpu_capability()


def start() -> None:
    """Begin to build the kernels beside whatever else is compiled."""
    _library()


@functools.cache
def function(name: str) -> Any:
    """An ``extern "C"`` function of the kernels, as ctypes has it; waits for the build. None where it failed, after a
    warning with the compiler's message.
    """
    library = _built_library()
    return None if library is None else getattr(library, name)


def multiplies_pairs() -> bool:
    """Whether the kernels multiply pairs of bfloat16 as they are, by an instruction of this processor's."""
    return dispatcher.multiplies_pairs() and problem() is None and _library_multiplies_pairs()


@functools.cache
def _library_multiplies_pairs() -> bool:
    ask = function("multiplies_pairs")
    return ask is not None and bool(ask())


def call(name: str, *args: Any) -> None:
    """Call a function of the kernels, which must be there.

    Raises:
        RuntimeError: it has no memory for its work.
    """
    if function(name)(*args):
        raise RuntimeError(f"out of memory: the kernel {name} cannot allocate its work buffers")


def loaded_file() -> pathlib.Path | None:
    """The library of this process, if it has one."""
    loaded = _loaded()
    return pathlib.Path(loaded.result()._name) if loaded is not None else None


def forget() -> None:
    """Build or load anew at the next call."""
    _builds.clear()
    for cached in (function, _built_library, _library_multiplies_pairs):
        cached.cache_clear()


@functools.cache
def _built_library() -> Any:
    try:
        return _library().result()
    except Exception as error:  # CppCompileError, and what a full disk or a broken linker raises
        log.warning("the kernels in C++ for cpu could not be built, slower ones run instead: %s", error)
        return None


def _compiler() -> tuple[str, str | None]:
    """The compiler that Inductor takes, and why there is none."""
    import torch._inductor.config as config

    return _search_compiler(repr(config.cpp.cxx), os.environ.get("PATH", ""))


@functools.lru_cache(8)
def _search_compiler(setting: str, path: str) -> tuple[str, str | None]:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler(), None
    except Exception as error:  # InvalidCxxCompiler, and what asking a broken compiler for its version raises
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return "", f"no C++ compiler: {why}"


def _loaded() -> concurrent.futures.Future | None:
    """A build that succeeded, by whichever compiler."""
    return next((f for f in list(_builds.values()) if f.done() and f.exception() is None), None)


def _library() -> concurrent.futures.Future:
    if (loaded := _loaded()) is not None:
        return loaded
    compiler = _compiler()[0]
    if compiler not in _builds:
        build = _prepare()  # here, since settings of Inductor may be this thread's alone
        pool = concurrent.futures.ThreadPoolExecutor(1, "mindspeed_fx_cpp")
        _builds[compiler] = pool.submit(build)
        pool.shutdown(wait=False)
    return _builds[compiler]


def _forget_unfinished() -> None:
    """In a fork, which has none of its parent's threads: what they were building is never done there."""
    for compiler, future in list(_builds.items()):
        if not future.done():
            del _builds[compiler]
    if not _builds:
        forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_unfinished)


def _prepare() -> Callable[[], ctypes.CDLL]:
    """What loads the library, building it first where it is not in the cache."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import invalid_vec_isa

    # Inductor finds out what the processor has by trying, and keeps it in objects that two threads spoil: the flags of
    # its own kernels would then depend on chance, and caches miss. Ours need no answer but -march=native.
    flags = _FLAGS + (_WIDE if capability() == "AVX512" else ())
    options = CppTorchDeviceOptions(vec_isa=invalid_vec_isa, device_type="cpu", extra_flags=flags)
    command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    source = "\n".join(path.read_text() for path in sorted(SOURCES.glob("*.cpp")))
    key = hashlib.sha256("\0".join((source, command, processor())).encode()).hexdigest()[:32]

    def build(folder: pathlib.Path) -> bytes:
        """What is in the library."""
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
            text = pathlib.Path(scratch, "kernels.cpp")
            text.write_text(source)
            builder = CppBuilder(name="kernels", sources=str(text), output_dir=scratch, BuildOption=options)
            builder.build()
            return pathlib.Path(builder.get_target_file_path()).read_bytes()

    inductor_cache.leave_untrusted_cache()
    return functools.partial(_load, inductor_cache.cache_directory(), key, build)


def processor() -> str:
    """What -march=native depends on: a cache may be shared between machines."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith("flags")), "")
    return ""


def _load(cache: str, key: str, build: Callable[[pathlib.Path], bytes]) -> ctypes.CDLL:
    try:
        folder = make_private(pathlib.Path(cache, "mindspeed_fx"))
        with _lock(folder / f"{key}.lock"):
            return _stored(folder, key) or _store(folder, key, build(folder))
    except OSError as error:  # a cache that is full, or can be read alone
        log.info("the kernels in C++ for cpu are not kept in %s: %s", cache, error)
        folder = process_folder()
        return _store(folder, key, build(folder))


def _stored(folder: pathlib.Path, key: str) -> ctypes.CDLL | None:
    """The library in the cache, if it is there and whole."""
    for path in sorted(folder.glob(f"{key}-*.so")):
        if hashlib.sha256(path.read_bytes()).hexdigest() == path.stem.rpartition("-")[2]:
            return ctypes.CDLL(str(path))
        log.info("%s is not what was built, and is built anew", path)
        path.unlink()
    return None


def _store(folder: pathlib.Path, key: str, data: bytes) -> ctypes.CDLL:
    path = folder / f"{key}-{hashlib.sha256(data).hexdigest()}.so"
    write_whole(path, data, 0o700)
    return ctypes.CDLL(str(path))


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
    """Of several processes one builds, the others wait; whoever dies lets go."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "a") as file:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError) or time.monotonic() > end:
                    break  # a file system without locks, or nobody is getting on
            time.sleep(0.05)
        yield
