"""Part of :mod:`mindspeed_fx.compat`: C++ kernels of one graph of Inductor's, compiled as a few libraries.

Inductor gives each kernel to the compiler by itself. What such a file includes takes the compiler far longer than the
kernel: 26 of a small Llama took 36 s of processor time one by one, and 3 s in one file, on a loaded machine
(benchmarks/results/2026-11-26-first_step.txt). The generated module names :class:`AsyncCompile` of this module in place
of Inductor's, so that it is found again when the module is loaded from a cache; kernels are the same text, compiled
with the same flags.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

from torch._inductor import async_compile, exc
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import clear_on_fresh_cache

from mindspeed_fx.compat import inductor_cache

MOST_KERNELS = 32
MOST_CHARACTERS = 100_000
"""Of one file: what is larger is compiled beside others, by as many compilers as Inductor starts."""

_ENTRY = re.compile(r'extern "C"(?=\s+void\s+kernel\()')
_ARGUMENT = re.compile(r"(const )?(\w+\*|int64_t|float)")
_FUNCTION, _TABLE = "static PyObject* {entry_func}_py", "static PyMethodDef py_methods[]"
_ROW = '{{"{entry_func}", {entry_func}_py, METH_VARARGS, ""}},'


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What Inductor asks to have compiled; in the generated module its name stands for this until ``wait``."""

    argtypes: tuple[str, ...]
    source: str

    @functools.cached_property
    def parts(self) -> tuple[str, str] | None:
        """Its first line, an include, and the rest, in which ``kernel`` may be in a namespace; None where it defines
        more than that, as templates of matrix products do."""
        include, _, body = self.source.strip().partition("\n")
        if not include.startswith("#include") or re.search(r"^\s*#(?!pragma)", body, re.MULTILINE):
            return None
        body, count = _ENTRY.subn("", body)
        if count != 1 or not all(map(_ARGUMENT.fullmatch, self.argtypes)):
            return None
        return include, body


class AsyncCompile(async_compile.AsyncCompile):
    """Inductor's, which a generated module makes one of; its C++ kernels are compiled together in :meth:`wait`."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        kernel = Kernel(tuple(argtypes), source_code)
        if kernel.parts is None or not can_join():
            return super().cpp_pybinding(argtypes, source_code)
        return kernel

    def wait(self, scope: dict[str, Any]) -> None:
        names = [name for name, value in scope.items() if isinstance(value, Kernel)]
        libraries = [(group, self._submitted([scope[name] for name in group])) for group in grouped(names, scope)]
        for group, load in libraries:
            try:
                functions = load()
            except exc.CppCompileError:  # what compiles alone need not compile beside others
                alone = super().cpp_pybinding
                functions = [alone(list(scope[name].argtypes), scope[name].source) for name in group]
            scope.update(zip(group, functions, strict=True))
        super().wait(scope)

    def _submitted(self, kernels: Sequence[Kernel]) -> Callable[[], list[Callable]]:
        """Begins to compile them; what waits for it returns their functions."""
        is_parallel = async_compile.get_compile_threads() > 1
        load = Library.load_written(joined(kernels), self.submit if is_parallel else None)
        return lambda: [getattr(library, f"kernel_{n}") for library in [load()] for n in range(len(kernels))]


@clear_on_fresh_cache
class Library(CppPythonBindingsCodeCache):
    """Compiled files by name."""

    cache: dict[str, Callable[[], Any]] = {}
    cache_clear = staticmethod(cache.clear)
    entry_function = "kernels"

    @classmethod
    def load_written(cls, source: str, submit: Any) -> Callable[[], Any]:
        """As ``load_async``, which has the compiler read its headers in every process (0.3 s); here only where no
        earlier process has written the library."""
        load = WrittenLibrary.load_async(source)
        key = next((key for key, known in list(cls.cache.items()) if known is load), "")  # "": of another thread
        if not key or not inductor_cache.written_libraries(key):
            cls.cache.pop(key, None)
            load = cls.load_async(source, submit_fn=submit)
        return load


class WrittenLibrary(Library):
    """Inductor prepares no headers for it."""

    @classmethod
    def _get_uncompiled_header(cls, device: str) -> str | None:
        return None


def can_join() -> bool:
    """Whether this torch's text that binds a kernel to Python has the parts that are repeated for several."""
    template = CppPythonBindingsCodeCache.suffix_template
    return all(template.count(part) == 1 for part in (_FUNCTION, _TABLE, _ROW))


def grouped(names: Sequence[str], kernels: dict[str, Kernel]) -> list[list[str]]:
    """Names of kernels that share their include, in order, and no more than a file may have."""
    groups: dict[str, list[list[str]]] = {}
    sizes: dict[str, int] = {}
    for name in names:
        include, body = kernels[name].parts or ("", "")
        same = groups.setdefault(include, [[]])
        if len(same[-1]) == MOST_KERNELS or (same[-1] and sizes[include] + len(body) > MOST_CHARACTERS):
            same.append([])
        sizes[include] = len(body) + (sizes[include] if same[-1] else 0)
        same[-1].append(name)
    return [group for same in groups.values() for group in same]


def joined(kernels: Sequence[Kernel]) -> str:
    """One C++ file: each kernel in a namespace of its own, and functions ``kernel_0``, ``kernel_1``, ... for Python."""
    parts = [kernel.parts for kernel in kernels]
    template = CppPythonBindingsCodeCache.suffix_template
    head, rest = template.split(_FUNCTION)
    function, tail = rest.split(_TABLE)
    blank = {"extra_parse_arg": "", "entry_func": Library.entry_function}
    bodies, functions, rows = [], [], []
    for n, (kernel, (_, body)) in enumerate(zip(kernels, parts)):
        bodies.append(f"namespace kernel_{n}_of_library {{\n{body}\n}}\n")
        arguments = ", ".join(
            f"parse_arg<{argtype.replace('const ', '')}>(args, {i})" for i, argtype in enumerate(kernel.argtypes)
        )
        call = f"kernel_{n}_of_library::kernel({arguments}); Py_RETURN_NONE;"
        own = {"entry_func": f"kernel_{n}", "arg_len": len(kernel.argtypes), "call_entry_func": call}
        functions.append((_FUNCTION + function).format(**own))
        rows.append(_ROW.format(**own))
    table = (_TABLE + tail).format(**blank).replace(_ROW.format(**blank), "\n".join(rows))
    return "\n".join([parts[0][0], *bodies, head.format(**blank), *functions, table])


@contextlib.contextmanager
def named_in_code() -> Iterator[None]:
    """Meanwhile the modules that Inductor writes name this module's :class:`AsyncCompile`."""
    from torch._inductor.codegen import wrapper

    with mock.patch.object(wrapper, "async_compile", sys.modules[__name__]):
        yield
