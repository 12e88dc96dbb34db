"""A step compiled once and loaded by later processes: :func:`save_compiled` and :func:`load_compiled`.

def step(model, tokens, labels):
    return model(tokens, labels=labels).loss

mindspeed_fx.save_compiled(step, "step.mfx", (model, tokens, labels))      # once
step = mindspeed_fx.load_compiled(step, "step.mfx")                        # in every run
step(model, tokens, labels).backward()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import types
import warnings
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch

from mindspeed_fx import arguments
from mindspeed_fx.backend import mindspeed
from mindspeed_fx.compat import ahead, dynamo
from mindspeed_fx.compat.graph_inputs import device_of
from mindspeed_fx.errors import OptionError
from mindspeed_fx.hooks import identity
from mindspeed_fx.options import Options
from mindspeed_fx.planning import saved_file, saved_parts
from mindspeed_fx.planning.saved_file import StaleFile
from mindspeed_fx.report import recorder
from mindspeed_fx.torch_compile import compile_with_backend

log = logging.getLogger(__name__)


class LoadedStep:
    """A step whose compiled form was read from a file.

    Attributes:
        reason: why the file was not taken, so that the step is compiled anew; None where it was.
        misses: of calls that the file's guards refused (other shapes, types, modes), the reason of each one that led to
            a compilation.
    """

    def __init__(self, step: Callable, options: Mapping[str, Any] | None, dynamic: bool | None):
        functools.update_wrapper(self, step, updated=())
        self.reason: str | None = None
        self.misses: list[str] = []
        self._function, self._first = _as_function(step)
        settings = {"options": dict(options) if options is not None else None, "dynamic": dynamic}
        self._compile = functools.partial(compile_with_backend, step, **settings)
        self._ahead: Any = None
        self._anew: Callable | None = None
        self._later: Callable[[list], Any] | None = None
        self._path: str | os.PathLike = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._later is not None:
            later, self._later = self._later, None
            self._take_file(lambda: later(self.find_shardings((*self._first, *args, kwargs))))
        if self._ahead is not None:
            whole = (*self._first, *args)
            why = ahead.refusal(self._ahead, whole, kwargs)
            if why is None:
                return ahead.call(self._ahead, whole, kwargs)
            if why not in self.misses:
                log.warning("the saved step is not for these arguments, which are compiled anew: %s", why)
                self.misses.append(why)
        if self._anew is None:
            self._anew = self._compile()
        return self._anew(*args, **kwargs)

    def take(self, compiled: Any) -> None:
        self._ahead = compiled

    def find_shardings(self, values: Sequence[Any]) -> list:
        """Of the parallelized models in ``values``, and of those that the step reads or closes over."""
        return saved_parts.find_shardings([*values, *ahead.outer_objects(self._function).values()])

    def read(self, path: str | os.PathLike, options: Options, dynamic: bool | None) -> None:
        """Take the file, at once, or, where a parallelized model comes with the arguments, in the first call."""

        def read() -> Any:
            compiled, parts = _read(self._function, path, options, dynamic)
            if parts is None:
                return compiled()
            if not (shardings := self.find_shardings(self._first)):
                self._later = lambda shardings: saved_parts.read(parts, shardings, compiled)
                return None
            return saved_parts.read(parts, shardings, compiled)

        self._path = path
        self._take_file(read)

    def _take_file(self, read: Callable[[], Any]) -> None:
        try:
            self.take(read())
        except StaleFile as stale:
            self.reason = str(stale)
            path = os.fspath(self._path)
            warnings.warn(f"{path} is not taken, and the step is compiled anew: {stale}", stacklevel=4)


def save_compiled(
    step: Callable,
    path: str | os.PathLike,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> LoadedStep:
    """Compile ``step`` for these arguments, forward and backward, and write it into a file for later processes.

    Args:
        step: module or function, also what ``torch.compile(step, backend="mindspeed", ...)`` made of it, whose options
            it then has. Models, optimizers and tensors that a function closes over stay outside of the file, by name.
        path: the file; replaced as a whole. Of a parallelized model each rank writes its own, ``path.rank0`` and so on.
        args, kwargs: arguments of one call. Nothing is run.
        options: see :class:`mindspeed_fx.options.Options`; generated code alone can be kept.
        dynamic: as in ``torch.compile``; with True a size is a symbol, and the file serves others too.

    Returns:
        The step, ready to be called.

    Raises:
        ArgumentError: no function, arguments that it does not take.
        OptionError: what was compiled cannot be kept: options without caches (``dump``, ``check``), codegen "eager",
            stages of a pipeline, a parallelized model that the step is not given, a torch that has no such files.
        torch._dynamo.exc.Unsupported: the step breaks into several graphs.
    """
    arguments.check_callable("save_compiled", "step", step)
    step, options = _uncompiled(step, options)
    arguments.check_call("save_compiled", args, kwargs, step)
    arguments.check_options("save_compiled", options)
    arguments.check_output("path", os.fspath(path))
    device = device_of(_tensors((step, *args, kwargs)))
    resolved = Options.parse(options).resolve(device)
    _check_writable(resolved)
    loaded = LoadedStep(step, options, dynamic)
    settings = dict(options) if options is not None else None
    whole, named = (*loaded._first, *args), ahead.outer_objects(loaded._function)
    shardings = loaded.find_shardings((*whole, kwargs))

    def backend(gm: Any, inputs: Sequence[Any]) -> Any:
        return saved_parts.as_writable(mindspeed(gm, inputs, options=settings))

    try:
        with (
            ahead.recording_libraries() as libraries,
            _without_gradients(_tensors((*whole, kwargs, *named.values()))),
            saved_parts.guards_written(shardings),
        ):
            compiled = ahead.compile_ahead(loaded._function, whole, dict(kwargs or {}), backend, dynamic)
    except Exception as error:
        if not ahead.is_unwritable(error):
            raise
        raise _unkept(error) from error
    parts = saved_parts.describe(compiled, shardings)
    try:
        program = ahead.to_bytes(compiled, named)
        own = functools.partial(ahead.from_bytes, program, loaded._function, named)
        loaded.take(own() if parts is None else saved_parts.read(parts, shardings, own))
    except Exception as error:  # of pickle and of what it meets
        raise _unkept(error) from error
    made_by = {
        **_made_by(resolved, device),
        "dynamic": dynamic,
        "device": device,
        "vectors": ahead.vector_instructions() if device == "cpu" else [],
        "code": saved_file.digest_code(ahead.traced_code(compiled)),
        "parts": parts,
    }
    places = {place: file for file in libraries if (place := ahead.cached_name(file)) is not None}
    saved_file.write(path if parts is None else saved_parts.file_of_rank(path), made_by, program, places)
    return loaded


def load_compiled(
    step: Callable, path: str | os.PathLike, *, options: Mapping[str, Any] | None = None, dynamic: bool | None = None
) -> LoadedStep:
    """``step`` with what :func:`save_compiled` wrote, which is code: load what you, or whom you trust, saved.

    A file that does not fit (other versions of torch, Python or this package, another machine, other options, sources
    that changed, a torn or missing file; another rank, world size, mesh or plan) is not taken: a warning names it and
    the difference, and the step is compiled when it is called. So are calls whose arguments the file's guards refuse.

    Args:
        step: the module or function that was saved, or what ``torch.compile`` made of it.
        path: as it was given to :func:`save_compiled`.
        options, dynamic: as they were given to :func:`save_compiled`.

    Raises:
        ArgumentError: no function, no path.
        OptionError: a bad option, a stage of a pipeline.
    """
    arguments.check_callable("load_compiled", "step", step)
    step, options = _uncompiled(step, options)
    arguments.check_options("load_compiled", options)
    arguments.check_path("load_compiled", "path", path)
    loaded = LoadedStep(step, options, dynamic)
    own = saved_parts.file_of_rank(path)
    loaded.read(own if os.path.exists(own) else path, Options.parse(options), dynamic)
    return loaded


def _read(
    function: Callable, path: str | os.PathLike, options: Options, dynamic: bool | None
) -> tuple[Callable[[], Any], dict[str, Any] | None]:
    """What reads the program, and what the file says of a plan."""
    if why := ahead.problem():
        raise StaleFile(why)
    header = saved_file.read_header(path)
    device = str(header.get("device"))
    saved_file.compare(header, _made_by(options.resolve(device), device))
    if header.get("dynamic") != dynamic:
        raise StaleFile(f"dynamic was {header.get('dynamic')} and is {dynamic}")
    saved_parts.compare_rank(header.get("parts"))
    program = saved_file.read_program(path, header)

    def from_bytes() -> Any:
        try:
            return ahead.from_bytes(program, function, ahead.outer_objects(function), header.get("vectors", ()))
        except Exception as error:
            raise StaleFile(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error

    return from_bytes, header.get("parts")


def _check_writable(options: Options) -> None:
    """
    Raises:
        OptionError: what these options compile cannot be kept in a file.
    """
    if why := ahead.problem():
        raise OptionError(f"save_compiled: {why}; torch 2.13 can")
    if options.codegen != "inductor":
        raise OptionError(
            f'option "codegen" is "{options.codegen}", whose graphs are run and not generated; valid with '
            'save_compiled: "inductor"'
        )
    if reasons := recorder.why_uncached(options):
        raise OptionError(f"save_compiled: what is compiled cannot be kept: {', '.join(reasons)}")


def _unkept(error: Exception) -> OptionError:
    return OptionError(f"save_compiled: what the step holds cannot be kept in a file: {error}")


def _made_by(options: Options, device: str) -> dict[str, Any]:
    return {
        "versions": saved_file.describe_versions(),
        "machine": saved_file.describe_machine(device),
        "options": options.as_dict(),
        "identity": identity(options),
    }


def _call_module(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return model(*args, **kwargs)


def _as_function(step: Callable) -> tuple[Any, tuple]:
    """What is traced, and its first arguments. A module is an argument, so that its hooks run and its parameters are
    inputs; of a method its object."""
    if isinstance(step, torch.nn.Module):
        return types.FunctionType(_call_module.__code__, dict(_call_module.__globals__), _call_module.__name__), (step,)
    if isinstance(step, types.MethodType):
        return step.__func__, (step.__self__,)
    if not isinstance(step, types.FunctionType):
        arguments.refuse("save_compiled", "step", step, "a module, a function or a method is expected")
    return step, ()


@contextlib.contextmanager
def _without_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, no tensor has one: guards are written with their tensors, and read back where gradients are missing."""
    kept = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor, _ in kept:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient


def _uncompiled(step: Callable, options: Mapping[str, Any] | None) -> tuple[Callable, Mapping[str, Any] | None]:
    own, compiled_options = dynamo.compiled_of_backend(step, "mindspeed")
    return own, compiled_options if options is None else options


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for value in torch.utils._pytree.tree_leaves(list(values)):
        if isinstance(value, torch.nn.Module):
            tensors += [*value.parameters(), *value.buffers()]
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
    return tensors
