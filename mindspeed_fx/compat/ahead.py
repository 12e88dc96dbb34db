"""Part of :mod:`mindspeed_fx.compat`: functions compiled ahead of their first call, as bytes and back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import pathlib
import pickle
import re
import types
import warnings
from typing import Any, Callable, Iterator, Mapping, Sequence
from unittest import mock

import torch

from mindspeed_fx.compat import cpp
from mindspeed_fx.compat.inductor_cache import cache_directory, written_libraries


def problem() -> str | None:
    """Why this torch compiles nothing ahead; None where it does."""
    try:
        from torch._dynamo.aot_compile import aot_compile_fullgraph
    except ImportError:
        aot_compile_fullgraph = None
    if aot_compile_fullgraph is None or "dynamic" not in inspect.signature(aot_compile_fullgraph).parameters:
        return f"torch {torch.__version__} cannot write a compiled function with its guards into a file"
    return None


def compile_ahead(step: Callable, args: tuple, kwargs: dict, backend: Callable, dynamic: bool | None) -> Any:
    """``step``, compiled in one graph for these arguments, backward included, with its guards.

    Raises:
        RuntimeError: what the backend made cannot be written, or a guard cannot.
    """
    import torch._dynamo.config as config
    from torch._dynamo.aot_compile import aot_compile_fullgraph
    from torch._dynamo.hooks import Hooks

    # A float that is a symbol has Dynamo start over once it is known where it is read, which this way to it does not.
    with config.patch(specialize_float=True):
        hooks, write = Hooks(guard_filter_fn=_writable), _writing(backend)
        return aot_compile_fullgraph(step, (args, kwargs), hooks, write, dynamic=dynamic)


def _writing(backend: Callable) -> Callable:
    """``backend``, whose graphs can be written: torch 2.11 makes that of what its own backends return, later ones of
    all that AOTAutograd made."""
    from torch._dynamo.aot_compile import aot_compile_fullgraph
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable

    if "serialize" in aot_compile_fullgraph.__code__.co_consts:
        return backend

    def compiled(gm: Any, inputs: Sequence[Any]) -> Any:
        result = backend(gm, inputs)
        if isinstance(result, SerializableCallable) or getattr(result, "serialize", None) is None:
            return result
        return BundledAOTAutogradSerializableCallable(result)

    return compiled


def _writable(guards: Any) -> list[bool]:
    """Guards that a file can hold. The others compare objects by identity: functions and classes, whose sources are
    compared instead."""
    from torch._dynamo.guards import CheckFunctionManager

    unwritable = set(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
    return [
        guard.guard_type not in unwritable
        and not unwritable & set(guard.derived_guard_types or ())
        and PARTS not in guard.name
        for guard in guards
    ]


PARTS = "._sharded"
"""Of modules of a parallelized model, the names of their parameters with its number in this process."""


def is_unwritable(error: BaseException) -> bool:
    """Whether ``error`` says that a guard, or what it holds, cannot be written into a file."""
    from torch._dynamo.exc import PackageError

    text = str(error)
    return isinstance(error, (PackageError, pickle.PicklingError)) or bool(
        re.match("([Cc]an('t|not) (pickle|get))", text)
    )


def to_bytes(compiled: Any, outside: Mapping[str, Any]) -> bytes:
    """Forward, backward, guards and bytecode.

    Args:
        compiled: of :func:`compile_ahead`.
        outside: name -> object that stays outside of the file and is given by name when it is read.

    Raises:
        RuntimeError: an object that is in neither.
    """
    return type(compiled).serialize(compiled, dict(outside)).serialized_data


def from_bytes(
    data: bytes, function: Callable, outside: Mapping[str, Any], vectors: Sequence[Sequence[str]] = ()
) -> Any:
    """What :func:`to_bytes` wrote, which runs code of the file: as it was compiled, it is not compiled again.

    Args:
        data: it.
        function: which was compiled. Names of its module and of functions around it mean what they mean when the
            compiled function is called, as everywhere in Python.
        outside: objects by their names.
        vectors: :func:`vector_instructions` of the same processor; empty: they are found out.
    """
    from torch._dynamo import package
    from torch._dynamo.aot_compile import AOTCompiledFunction
    from torch._dynamo.convert_frame import get_compile_id
    from torch._dynamo.utils import get_metrics_context
    from torch._guards import CompileContext, compile_context

    with compile_context(CompileContext(get_compile_id({}))), get_metrics_context(), _compiled_already(vectors):
        # Torch would make guards over copies of the function's names, which are made once below over the names.
        unmade = [mock.patch.object(package, name, return_value=None) for name in _GUARDS]
        with unmade[0], unmade[1]:
            compiled = AOTCompiledFunction.deserialize(data, dict(function.__globals__), dict(outside))
        return _with_live_names(compiled, function)


_readings = itertools.count()
_GUARDS = ("load_guards_state", "load_guard_manager")


def _with_live_names(compiled: Any, function: Any) -> Any:
    """Torch copies globals and closed-over variables when it reads a function, so that neither guards nor the function
    would see that one of them is set later."""
    from torch._dynamo.package import load_guard_manager, load_guards_state

    artifacts = compiled._artifacts
    known, names = function.__globals__, compiled.fn.__globals__
    for name in {*artifacts.runtime_env.import_sources, *artifacts.runtime_env.used_globals}:
        known.setdefault(name, names[name])
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    code = artifacts.runtime_env.bytecode
    # Of its own: Dynamo has given the name to another object where the file was written, and so has an earlier reading.
    own = f"{artifacts.backend_id}_{next(_readings)}"
    known[own] = artifacts.compiled_fn
    code = code.replace(co_names=tuple(own if name == artifacts.backend_id else name for name in code.co_names))
    closure = tuple(cells[name] for name in code.co_freevars) or None
    artifacts.runtime_env = dataclasses.replace(artifacts.runtime_env, closure=closure)
    compiled.fn = types.FunctionType(code, known, closure=closure, argdefs=artifacts.runtime_env.argdefs)
    compiled.fn.__kwdefaults__ = artifacts.runtime_env.kwdefaults
    state = load_guards_state(artifacts.guards_state)
    artifacts.guard_manager = load_guard_manager(state, artifacts.original_code, known)
    return compiled


def refusal(compiled: Any, args: tuple, kwargs: dict) -> str | None:
    """Which guard these arguments do not pass; None where they pass all."""
    if compiled.guard_check(*args, **kwargs):
        return None
    checked = compiled._artifacts.guard_manager.check_verbose(compiled.prepare_f_locals(*args, **kwargs))
    return "; ".join(str(part).partition("  #")[0].strip() for part in checked.verbose_code_parts) or "a guard fails"


def call(compiled: Any, args: tuple, kwargs: dict) -> Any:
    """The function, whose guards were asked before."""
    return compiled.fn(*args, **kwargs)


def traced_code(compiled: Any) -> Iterator[tuple[str, int, int]]:
    """Module, first line and the line after the last one, of every function that was traced."""
    for source in compiled.source_info().inlined_sources:
        yield source.module, source.firstlineno, source.lastlineno


def outer_objects(step: Any) -> dict[str, Any]:
    """Objects that a function closes over, or reads from its module, by their names; numbers and text are its own."""
    code, cells, known = step.__code__, step.__closure__ or (), step.__globals__
    closed = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells) if _is_set(cell)}
    read = {name: known[name] for name in code.co_names if name in known}
    return {name: value for name, value in {**read, **closed}.items() if _has_identity(value)}


def _is_set(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _has_identity(value: Any) -> bool:
    """Modules, tensors and objects with state; a file holds plain values itself, and imports functions and classes."""
    plain = (int, float, complex, str, bytes, tuple, torch.dtype, torch.device, type, types.ModuleType)
    return not isinstance(value, plain) and not inspect.isroutine(value) and value is not None


def vector_instructions() -> list[list[str]]:
    """What Inductor found out that this processor and its compiler have, best first: class and compiler flags. It tries
    each in a process of its own."""
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    return [[type(isa).__name__, isa.build_arch_flags()] for isa in valid_vec_isa_list()]


@contextlib.contextmanager
def _compiled_already(vectors: Sequence[Sequence[str]]) -> Iterator[None]:
    """Within, Inductor tries no vector instructions and prepares no headers: for the same processor it has done so."""
    from torch._inductor import codecache, cpu_vec_isa

    known = _known_instructions(vectors)
    with contextlib.ExitStack() as stack:
        # The setting for it would give libraries other names. What is compiled none the less reads the header itself.
        stack.enter_context(mock.patch.object(codecache, "_precompile_header", lambda header, *_, **__: header))
        if known:
            stack.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: known))
        yield


def _known_instructions(vectors: Sequence[Sequence[str]]) -> list[Any]:
    """Inductor's objects of :func:`vector_instructions`; none where one would be compiled for with other flags."""
    from torch._inductor import cpu_vec_isa

    instructions = []
    for name, flags in vectors:
        isa = next((copy.copy(i) for i in cpu_vec_isa.supported_vec_isa_list if type(i).__name__ == name), None)
        if isa is None:
            return []
        if isa.build_arch_flags() != flags and hasattr(isa, "_is_avx512_bf16_supported"):
            isa._is_avx512_bf16_supported = True
        if isa.build_arch_flags() != flags:
            return []
        instructions.append(isa)
    return instructions


@contextlib.contextmanager
def recording_libraries() -> Iterator[list[pathlib.Path]]:
    """Shared libraries that code compiled within loads, complete at the end: Inductor's kernels and ours."""
    from torch._inductor import codecache
    from torch._inductor.utils import clear_caches

    from mindspeed_fx.compat.kernel_library import Library

    libraries: list[pathlib.Path] = []
    clear_caches()  # what is loaded already is recorded too
    yield libraries
    kinds = [each for each in vars(codecache).values() if isinstance(each, type)]
    keys = {key for each in (*kinds, Library) if issubclass(each, codecache.CppCodeCache) for key in each.cache}
    libraries += sorted(path for key in keys for path in written_libraries(key))
    if (own := cpp.loaded_file()) is not None:
        libraries.append(own)


def cached_name(library: pathlib.Path) -> str | None:
    """Where a library lies in Inductor's cache, as a relative path; None where it lies elsewhere."""
    with contextlib.suppress(ValueError):
        return library.resolve().relative_to(pathlib.Path(cache_directory()).resolve()).as_posix()
    return None


def module_lines(name: str) -> list[str] | None:
    """Source lines of an imported module, or of one that can be imported; None where there is none."""
    import importlib

    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return inspect.getsource(importlib.import_module(name)).splitlines(keepends=True)
    return None
