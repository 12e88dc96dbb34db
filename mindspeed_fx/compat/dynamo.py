"""Dynamo: graph breaks, recompilation, side effects under checkpointing, and ``torch.compile`` from its parts."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import time
import types
import warnings
from typing import Any, Callable, Iterator

import torch

from mindspeed_fx.errors import OptionError


def rebuilt_torch_compile(
    model: Callable,
    *,
    backend: Any = "inductor",
    options: dict | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Callable:
    """What ``torch.compile`` does, from its parts: for a process in which the function itself was lost."""
    import torch._dynamo

    if backend == "inductor":
        wrapped: Any = torch._TorchCompileInductorWrapper(mode or (None if options else "default"), options, dynamic)
    else:
        wrapped = torch._TorchCompileWrapper(backend, mode or "default", options, dynamic)
    return torch._dynamo.optimize(backend=wrapped, nopython=fullgraph, dynamic=dynamic)(model)


WAIT = 600.0
"""Seconds after which a graph is made beside whatever compiles: a wait for one another would never end."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within, no other thread makes a graph: torch holds this lock while it compiles a forward, and not while it
    compiles a backward. Tracing replaces ``nn.Module.__call__`` meanwhile, which Dynamo reads in every thread."""
    from torch._dynamo.convert_frame import compile_lock

    held = compile_lock.acquire(timeout=WAIT)
    try:
        yield
    finally:
        if held:
            compile_lock.release()


@contextlib.contextmanager
def collecting_graph_breaks() -> Iterator[list[str]]:
    """Texts of the graph breaks that Dynamo meets within, one for each, with the line of the model."""
    import torch._dynamo.utils as utils

    results: list[str] = []
    before = dict(utils.counters["graph_break"])
    try:
        yield results
    finally:
        for reason, count in utils.counters["graph_break"].items():
            results.extend([" ".join(reason.split())] * (count - before.get(reason, 0)))


def frame_seconds() -> float:
    """Seconds since Dynamo began with the frame that it is compiling; 0.0 outside of one, or where this torch does not
    tell."""
    from torch._dynamo import utils

    context = utils.get_metrics_context() if hasattr(utils, "get_metrics_context") else None
    start = getattr(context, "_start_time_ns", 0) if context is not None and context.in_progress() else 0
    return max(0.0, time.time() - start * 1e-9) if start else 0.0


def fresh_callable(model: Callable) -> Callable:
    """Something Dynamo has not compiled yet: its caches hang on code objects, which a second compile would hit."""
    if isinstance(model, torch.nn.Module):
        return model

    @functools.wraps(model)
    def fresh(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return _with_own_code(fresh)


def uncompiled(model: Callable) -> Callable:
    """``model`` itself where it was compiled whole, by ``torch.compile(model)`` or ``model.compile()``."""
    own = getattr(model, "_orig_mod", model)
    is_compiled = isinstance(own, torch.nn.Module) and own._compiled_call_impl is not None
    return own._call_impl if is_compiled else own


def compiled_of_backend(step: Callable, name: str) -> tuple[Callable, dict | None]:
    """What ``torch.compile(step, backend=name, options=...)`` was given, step and options; of another callable itself.

    Raises:
        OptionError: it was compiled by another backend.
    """
    own = getattr(step, "_torchdynamo_orig_callable", None)
    if own is None:
        return step, None
    own = getattr(step, "_orig_mod", own)
    backend = _backend_of(step)
    if getattr(backend, "compiler_name", None) != name:
        raise OptionError(
            f'{own} was compiled by another backend; compile it with backend="{name}", or give it as it is'
        )
    return own, options_of(backend)


def _backend_of(step: Any) -> Any:
    from torch._dynamo import eval_frame

    context = getattr(step, "dynamo_ctx", None)
    for cell in getattr(step, "__closure__", None) or ():
        if isinstance(cell.cell_contents, eval_frame._TorchDynamoContext):
            context = cell.cell_contents
    return eval_frame.innermost_backend(context.callback) if context is not None else None


def _with_own_code(function: Any) -> Any:
    """``function``, a closure, whose code object is no other closure's."""
    function.__code__ = function.__code__.replace()
    return function


def recompiling() -> Any:
    """Context in which Dynamo compiles however many variants of one code object it has already."""
    import torch._dynamo.config as config

    limits = {"recompile_limit", "accumulated_recompile_limit", "cache_size_limit", "accumulated_cache_size_limit"}
    return config.patch({name: 2**20 for name in limits if name in config.get_config_copy()})


def allow_side_effects_under_checkpoint() -> Callable[[], None]:
    """Let Dynamo capture a checkpointed function with side effects, which a recomputation skips; returns what takes
    that back. Nothing happens where Dynamo has no such setting."""
    return _switch_on("skip_fwd_side_effects_in_bwd_under_checkpoint")


def capture_sizes() -> Callable[[], None]:
    """Let Dynamo make symbols of numbers that are read from tensors; returns what takes that back."""
    return _switch_on("capture_scalar_outputs")


def reorder_warnings() -> Callable[[], None]:
    """Let Dynamo give warnings after a graph instead of breaking it there; returns what takes that back. A stack level
    given by name is forgotten, for which torch 2.14 would break the graph."""
    functions = torch._dynamo.config.reorderable_logging_functions
    if warnings.warn in functions:
        return lambda: None
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.misc import DebuggingVariable

    allows = DebuggingVariable.can_reorder_logs

    def allows_names(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        if function is warnings.warn:
            args, kwargs = [*args, *kwargs.values()], {}
        return allows(function, args, kwargs)

    def undo() -> None:
        functions.discard(warnings.warn)
        DebuggingVariable.can_reorder_logs = staticmethod(allows)

    functions.add(warnings.warn)
    if not allows(warnings.warn, [], {"stacklevel": ConstantVariable.create(2)}):
        DebuggingVariable.can_reorder_logs = staticmethod(allows_names)
    return undo


def _switch_on(name: str) -> Callable[[], None]:
    import torch._dynamo.config as config

    if not hasattr(config, name):
        return lambda: None
    before = getattr(config, name)
    setattr(config, name, True)
    return lambda: setattr(config, name, before)


def compile_alone(module: torch.nn.Module, **settings: Any) -> None:
    """``module.compile(**settings)``, with graphs that no other module takes: torch keeps graphs by code object, and
    modules alike share them, even where the backend wrote into them whose they are.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(_with_own_code(call), **settings)


def before_compiled_calls(module: torch.nn.Module, function: Callable[[], None]) -> None:
    """Call ``function`` before every call of a compiled module, outside of its graphs (hooks of the module are
    inside)."""

    def called(call: Callable[[], Any]) -> Any:
        function()
        return call()

    around_compiled_calls(module, called)


def around_compiled_calls(module: torch.nn.Module, function: Callable[[Callable[[], Any]], Any]) -> None:
    """Have ``function`` make every call of a compiled module, which it gets without arguments, outside of its
    graphs."""
    call = module._compiled_call_impl

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(lambda: call(*args, **kwargs))

    module._compiled_call_impl = called


def start_over(why: str) -> BaseException:
    """What a backend raises so that Dynamo reads the frame again, and may read it otherwise: Dynamo (2.13) lets the
    first of these through from a backend, and forgets its notes of the frame for the second."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis

    class Again(TensorifyScalarRestartAnalysis, UnspecializeRestartAnalysis):
        pass

    return Again(restart_reason=why)


def starts_over(error: BaseException) -> bool:
    """Whether ``error`` is no error: Dynamo reads the frame again, with other symbols."""
    from torch._dynamo.exc import RestartAnalysis

    return isinstance(error, RestartAnalysis)


@functools.lru_cache(maxsize=1)
def jumps_leave_blocks() -> bool:
    """Whether this Python's table of exceptions omits jumps at the end of a loop inside of ``with`` (3.13 does)."""

    def loop(context: Any, values: Any) -> None:
        with context:
            for value in values:
                if value:
                    value()

    entries = getattr(dis.Bytecode(loop), "exception_entries", ())
    jumps = [i.offset for i in dis.get_instructions(loop) if i.opname.startswith("POP_JUMP")]
    return bool(entries) and any(not any(e.start <= jump < e.end for e in entries) for jump in jumps)


def keep_contexts_over_jumps() -> None:
    """Have Dynamo end no ``with`` at a conditional jump that this Python's table of exceptions omits, as it ends none
    at a jump back: it took the jump for the end of all, and failed where there are two (a decoder of Megatron-core)."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as Translator

    update = Translator.update_block_stack
    if not jumps_leave_blocks() or update.__name__ == "unless_it_jumps":
        return

    def unless_it_jumps(self: Any, inst: Any) -> None:
        if inst.exn_tab_entry or not inst.opname.startswith("POP_JUMP"):
            update(self, inst)

    Translator.update_block_stack = unless_it_jumps


def tell_compiling_from_export() -> None:
    """``torch.compiler.is_exporting()`` is false within ``torch.compile`` where Dynamo takes it for true (2.11, 2.12).

    transformers' models have loops for exports in the place of scans and of solved systems: of Mamba's scan, one step
    of Python for each token. As 2.13 does, the answer is what ``torch.export`` sets.
    """
    from torch._dynamo.variables import torch as functions

    if "_is_exporting_flag" in inspect.getsource(functions):
        return
    known = functions.tracing_state_functions()

    class States(dict):
        def __getitem__(self, function: Any) -> Any:
            if function is torch.compiler.is_exporting:
                return torch.compiler._is_exporting_flag
            return super().__getitem__(function)

    functions.tracing_state_functions = functools.cache(lambda: States(known))


def skip_guards_on_empty_hooks() -> None:
    """Have Dynamo keep no guard on a module's having no hooks, as ``skip_nnmodule_hook_guards`` asks: torch 2.14 knows
    where the empty dict is from, and guards its truth all the same. Megatron adds hooks after the first step."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Module

    read = getattr(Module, "tp_getattro_impl", None)
    if "hooks_source" not in getattr(getattr(read, "__code__", None), "co_varnames", ()):
        return
    length = GuardBuilder.SEQUENCE_LENGTH

    @functools.wraps(length)
    def unless_no_hooks(self: Any, guard: Any) -> None:
        is_of_hooks = guard.name.endswith(("_hooks", "_hooks_with_kwargs"))
        if not (is_of_hooks and torch._dynamo.config.skip_nnmodule_hook_guards and not self.get(guard)):
            length(self, guard)

    GuardBuilder.SEQUENCE_LENGTH = unless_no_hooks


Context = Callable[[dict[str, Any] | None, dict[str, Any]], contextlib.AbstractContextManager]
"""Of the options that ``torch.compile`` was given, and the frame's variables."""


class _Around:
    """A context that Dynamo enters before it reads a frame for one backend and leaves when the frame is compiled."""

    def __init__(self, backend: Callable, context: Context):
        self.backend, self.context = backend, context
        self.entered = contextlib.ExitStack()

    def start(self, *_: Any) -> None:
        compiler, names = _compiling()
        if compiler is not None and function_of(compiler) is self.backend:
            self.entered.enter_context(self.context(options_of(compiler), names))

    def end(self, *_: Any) -> None:
        self.entered.close()


def while_compiling(backend: Callable, context: Context) -> None:
    """Have Dynamo compile every frame for ``backend``, the reading of Python included, within ``context(...)``. To be
    said again after ``torch._dynamo.reset``, which forgets it; saying it twice is once.
    """
    import torch._dynamo

    handler = torch._dynamo.callback_handler
    if not any(isinstance(getattr(f, "__self__", None), _Around) for f in handler.start_callbacks):
        around = _Around(backend, context)
        handler.register_start_callback(around.start)
        handler.register_end_callback(around.end)


def _compiling() -> tuple[Callable | None, dict[str, Any]]:
    """Whom the frame is for that Dynamo begins with, a few callers up, and its variables."""
    from torch._dynamo import convert_frame

    frame = sys._getframe()
    for _ in range(16):
        if frame is None or frame.f_code is convert_frame._compile.__code__:
            break
        frame = frame.f_back
    known = frame.f_locals if frame is not None else {}
    if "compiler_fn" not in known:
        return None, {}
    return known["compiler_fn"], names_of(known["code"], known["locals"], known["globals"])


def names_of(code: types.CodeType, local: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """What a function that Dynamo reads knows by name: variables, those of outer functions, and globals."""
    names = {name: known[name] for name in code.co_names if name in known} | local
    for name, cell in local.items():
        if isinstance(cell, types.CellType):
            with contextlib.suppress(ValueError):  # nothing is in it yet
                names[name] = cell.cell_contents
    return names


def function_of(compiler: Callable) -> Callable:
    """What Dynamo gives its graphs -> the backend's own function, without options and what torch wraps it in."""
    from torch._dynamo import eval_frame

    own = eval_frame.innermost_backend(compiler)
    return getattr(own, "compiler_fn", own)


def options_of(compiler: Callable) -> dict[str, Any] | None:
    """The options that ``torch.compile`` was given for what Dynamo gives its graphs."""
    from torch._dynamo import eval_frame

    return getattr(eval_frame.innermost_backend(compiler), "kwargs", {}).get("options")
