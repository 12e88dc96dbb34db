"""C++ kernels of our own, built by Inductor's C++ builder: a part of :mod:`mindspeed_fx.compat`.

Inductor knows the compiler, the OpenMP library that torch itself runs on, and where libraries are cached.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import logging
import pathlib
from typing import Any

import torch

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


@functools.cache
def problem() -> str | None:
    """Why kernels in C++ cannot be built and fast here, or None."""
    if capability() not in ("AVX2", "AVX512"):
        return f"oneDNN's small matrix product is for x86 with AVX2 or AVX-512; this processor has {capability()}"
    if not torch.backends.mkldnn.is_available():
        return "this torch has no oneDNN"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # InvalidCxxCompiler, and what asking a broken compiler for its version raises
        return f"no C++ compiler: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return None


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


@functools.cache
def _built_library() -> Any:
    try:
        return _library().result()
    except Exception as error:  # CppCompileError, and what a full disk or a broken linker raises
        log.warning("the kernels in C++ for cpu could not be built, slower ones run instead: %s", error)
        return None


@functools.cache
def _library() -> concurrent.futures.Future:
    from torch._inductor.codecache import CppCodeCache

    # Inductor finds out what the processor has by trying, and keeps it in objects that two threads spoil: the flags of
    # its own kernels would then depend on chance, and caches miss. Ours need no answer but -march=native; torch before
    # 2.13 asks all the same.
    plain = {"needs_vec_isa": False} if "needs_vec_isa" in inspect.signature(CppCodeCache.load_async).parameters else {}
    if not plain:
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        pick_vec_isa()
    flags = _FLAGS + (_WIDE if capability() == "AVX512" else ())
    source = "\n".join(
        path.read_text() for path in sorted(SOURCES.glob("*.cpp"))
    )  # one text, since it is the key of the cache
    pool = concurrent.futures.ThreadPoolExecutor(1, "mindspeed_fx_cpp")
    try:
        return pool.submit(CppCodeCache.load, source, device_type="cpu", extra_flags=flags, **plain)
    finally:
        pool.shutdown(wait=False)
