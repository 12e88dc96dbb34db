"""Part of :mod:`mindspeed_fx.compat`: how a graph is traced, and which of its calls are more than operators."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import symbols


def fake_mode_of(values: Sequence[Any]) -> Any:
    """The mode of the first fake tensor in ``values``, be it inside a subclass; else the one in force, or None."""
    from torch._guards import detect_fake_mode

    for value in pytree.tree_leaves(values):
        if (mode := _mode_of(value)) is not None:
            return mode
    return detect_fake_mode()


def _mode_of(value: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(value, FakeTensor):
        return value.fake_mode
    if wraps_tensors(value):
        modes = (_mode_of(getattr(value, name)) for name in value.__tensor_flatten__()[0])
        return next((mode for mode in modes if mode is not None), None)
    return None


def is_fake(value: Any) -> bool:
    """True for a tensor that has a shape and no elements."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


@contextlib.contextmanager
def tracing_fake(values: Sequence[Any]) -> Iterator[Any]:
    """Trace on the fake values' own mode. Dynamo's fake mode is not the TracingContext's but shares its shape
    environment; without this mode and the Python dispatcher, symbolic sizes are baked in or lose their source."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = fake_mode_of(values) or FakeTensorMode()
    # What a graph leaves of the grad mode is its caller's to see, and not ours.
    grad_mode = torch.set_grad_enabled(torch.is_grad_enabled())
    no_hooks = _disable_saved_tensors_hooks_during_tracing()
    with symbols_given_up(mode, on_error=True), tracing(TracingContext(mode)), mode:
        with enable_python_dispatcher(), grad_mode, no_hooks:
            yield mode


@contextlib.contextmanager
def symbols_given_up(mode: Any, on_error: bool) -> Iterator[None]:
    """Sizes that depend on values, of fake calls whose results are in no graph: the next trace must not look for them
    among its own.

    Args:
        on_error: only where the calls end in one.
    """
    pending = getattr(getattr(mode, "shape_env", None), "pending_fresh_unbacked_symbols", [])
    symbols = list(pending)
    try:
        yield
    except Exception:
        pending[:] = symbols
        raise
    if not on_error:
        pending[:] = symbols


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Real computation in the middle of a compilation: no proxy, functional or torch-function mode sees it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def new_fake_mode(*, unknown_sizes: bool = False) -> Any:
    """A mode in which every tensor made is fake; constants of a model may be real.

    Args:
        unknown_sizes: numbers that are read from tensors are symbols; without it reading one is an error.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if unknown_sizes else None)


def is_fake_of(tensor: torch.Tensor, mode: Any) -> bool:
    """Whether a tensor was made under ``mode``, a FakeTensorMode."""
    return getattr(tensor, "fake_mode", None) is mode


def wraps_tensors(tensor: Any) -> bool:
    """True for tensors of subclasses that hold other tensors, such as DTensor."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(tensor)


def without_fake_mode() -> Any:
    """Context in which real tensors are made although a fake mode is active around us."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def make_fx_pre_dispatch(run: Callable, values: Sequence[Any], names: Sequence[str]) -> fx.GraphModule:
    """``run(*values)`` as a graph of ATen operators before autograd, with the origin of every node kept; also where an
    operator is being dispatched (``__torch_dispatch__``), below the key at which they are recorded."""
    from torch.fx.experimental.proxy_tensor import make_fx

    roots = []

    def note_root(*values: Any) -> Any:
        roots.append(_proxy_mode().tracer.root)
        return run(*values)

    recorded = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.PreDispatch, False)
    with fx.traceback.preserve_node_meta(), recorded:
        gm = make_fx(note_root, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*values)
    for root in roots:
        vars(root).clear()  # it stands in a circle with its tracer, and would keep the tensors that the graph holds
    for node, name in zip([n for n in gm.graph.nodes if n.op == "placeholder"], names):
        node._rename(name)
        node.target = node.name
    gm.recompile()
    return gm


def make_fx_decomposed(fn: Callable, values: Sequence[Any], decompositions: dict | None) -> fx.GraphModule:
    """``fn(*values)`` on fake values as a graph of ATen operators, decomposed by ``decompositions``.

    One value may stand in several places (DTensor gives operators of equal layout one fake result): ``make_fx`` tells
    inputs apart by object, so each gets an object of its own.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = fake_mode_of(values)
    with mode if mode is not None else contextlib.nullcontext(), enable_python_dispatcher(), torch.no_grad():
        values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
        return make_fx(fn, decomposition_table=decompositions or {}, tracing_mode="real", _allow_non_fake_inputs=True)(
            *values
        )


def _proxy_mode() -> Any:
    """The proxy mode in force while ``make_fx`` records, pre-dispatch or not."""
    from torch._ops import _get_dispatch_mode_pre_dispatch
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return mode if mode is not None else _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)


def collects_metadata() -> bool:
    """Whether AOTAutograd runs a function to see what it returns and writes, and records nothing."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return mode is not None and _proxy_mode() is None


def _attach(tracer: Any, module: Any, stem: str) -> str:
    index = 0
    while hasattr(tracer.root, f"{stem}_{index}"):
        index += 1
    name = f"{stem}_{index}"
    if isinstance(module, torch.nn.Module):
        tracer.root.register_module(name, module)
    else:
        setattr(tracer.root, name, module)
    return name


def record_opaque(target: Any, args: tuple, kwargs: dict, value: Any) -> Any:
    """Record one node for a higher-order operator without tracing into it; its outputs are ``value``."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

    tracer = _proxy_mode().tracer

    def operand(a: Any) -> Any:
        if isinstance(a, fx.GraphModule):
            return tracer.create_proxy("get_attr", _attach(tracer, a, "body"), (), {})
        return tracer.unwrap_proxy(a)

    args, kwargs = pytree.tree_map(operand, (tuple(args), dict(kwargs)))
    proxy = tracer.create_proxy("call_function", target, args, kwargs)
    with disable_proxy_modes_tracing():
        fresh = pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, value)
    return track_tensor_tree(fresh, proxy, constant=None, tracer=tracer)


def record_attribute(tensor: torch.Tensor) -> torch.Tensor:
    """Record a ``get_attr`` node for a constant tensor of the graph and return its fake value."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

    tracer = _proxy_mode().tracer
    proxy = tracer.create_proxy("get_attr", _attach(tracer, tensor, "constant"), (), {})
    with disable_proxy_modes_tracing():
        if not isinstance(tensor, FakeTensor):
            from torch._subclasses.fake_tensor import FakeTensorMode

            mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
            tensor = (mode or FakeTensorMode()).from_tensor(tensor, static_shapes=True)
    return track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)


def record_number(target: Any, args: tuple, value: Any) -> fx.Proxy:
    """Record a call whose result fake values show as the number or the bool ``value``; proxies among ``args`` stay."""
    tracer = _proxy_mode().tracer
    operands = tuple(a if isinstance(a, fx.Proxy) else tracer.unwrap_proxy(a) for a in args)
    proxy = tracer.create_proxy("call_function", target, operands, {})
    proxy.node.meta["val"] = value
    return proxy


def autograd_number(node: fx.Node) -> int | None:
    """The call of autograd that a node of a joint graph belongs to, the same for an operator and its gradient; None
    where AOTAutograd says nothing, and of a sum of a tensor's gradients, to which it gives the number of another call.
    """
    return None if node.meta.get("is_gradient_acc") else node.meta.get("seq_nr")


def is_data(target: Any) -> bool:
    """True for what Dynamo makes of ``tensor.data``."""
    return target is torch._C._autograd._get_data_attr


_DATA_ASSIGNMENT = getattr(torch.ops.aten, "shallow_copy_data_", None)


def is_data_assignment(target: Any) -> bool:
    """True for what Dynamo makes of ``tensor.data = other``: an operator since torch 2.14, before it a function that it
    puts after a ``set_``."""
    return target is _DATA_ASSIGNMENT or getattr(target, "__name__", "") == "_lower_version_count_by_1"


def is_higher_order(target: Any) -> bool:
    """True for operators that take graphs: autograd.Function, checkpoint, wrap, cond ..."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def is_autograd_function(target: Any) -> bool:
    """True for the node that Dynamo makes of ``autograd.Function.apply``."""
    return is_higher_order(target) and target.name() == "autograd_function_apply"


def is_checkpoint(target: Any) -> bool:
    """True for the node that Dynamo makes of ``torch.utils.checkpoint.checkpoint``."""
    return is_higher_order(target) and target.name() in ("tag_activation_checkpoint", "checkpoint")


def is_backward_state(value: Any) -> bool:
    """True for the input by which Dynamo hands the hooks of tensors to the backward."""
    from torch.fx.experimental._backward_state import BackwardState

    return isinstance(value, BackwardState)


def count_recorded() -> int:
    """How many nodes the trace in progress has recorded."""
    return len(_proxy_mode().tracer.graph.nodes)


def is_mutable(target: Any) -> bool:
    """True for operators that change an argument in place."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def is_grad_mode_switch(target: Any) -> bool:
    """True for the node that turns autograd on or off for the nodes after it."""
    return target is torch._C._set_grad_enabled


def has_side_effect(target: Any) -> bool:
    """True for operators that must stay although nobody uses their result (assertions, collectives' waits ...)."""
    from torch.fx.node import _side_effectful_functions

    name = str(target)
    return (
        target in _side_effectful_functions
        or name.startswith(("_c10d_functional", "c10d"))
        or "assert" in name
        or "sym_constrain" in name
    )


def is_function_transform(target: Any) -> bool:
    """True for the calls by which a Dynamo graph enters or leaves ``torch.func`` transforms such as vmap."""
    return str(getattr(target, "__module__", "")).startswith(("torch._functorch", "torch._C._functorch"))


def transform_nesting(target: Any) -> int:
    """1 for the call that enters a function transform, -1 for the one that leaves it, 0 for any other."""
    name = str(getattr(target, "__name__", ""))
    return 1 if name.endswith("_increment_nesting") else -1 if name.endswith("_decrement_nesting") else 0


def is_function_wrapper(value: Any) -> bool:
    """True for a tensor that a function transform wraps, such as a batched one."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


@contextlib.contextmanager
def in_one_graph(error: type[Exception], what: str, *otherwise: str) -> Iterator[None]:
    """Capture of a whole model within; where Dynamo breaks its graph, ``error`` says at which line and why. Calls of
    loggers are left out, and break nothing; recurrent layers (``nn.GRU``) are read, at which Dynamo ends a graph unless
    it is told otherwise.

    Args:
        what: that takes a model of one graph.
        otherwise: what else there is to do, for the message.
    """
    import logging

    calls = {
        logging.Logger.debug,
        logging.Logger.info,
        logging.Logger.warning,
        *(m for m in [getattr(logging.Logger, "warning_once", None)] if m),
    }
    config = torch._dynamo.config
    logs = getattr(config, "ignore_logging_functions", set())
    settings = {"ignore_logging_functions": logs | calls, "allow_rnn": True}
    try:
        with config.patch(**{name: value for name, value in settings.items() if hasattr(config, name)}):
            with _describable_settings():
                yield
    except Exception as e:
        if not _breaks_a_graph(e):
            raise
        frames = [f for f in getattr(e, "real_stack", None) or () if "/torch/" not in f.filename]
        at = f" at {'/'.join(frames[-1].filename.split('/')[-3:])}:{frames[-1].lineno}" if frames else ""
        remedies = ", or ".join(("take that call out of forward", *otherwise))
        raise error(
            f"{what} takes a model that is one graph, and Dynamo breaks this one{at} "
            f"({str(e).strip().splitlines()[0]}); {remedies}"
        ) from None


def _breaks_a_graph(error: Exception) -> bool:
    """Whether Dynamo says that what is captured is no single graph: by a call, or because a value decides what is run.
    Torch 2.11 loses the number that ``torch._check_tensor_all`` reads, and says that of itself."""
    if isinstance(error, torch._dynamo.exc.InternalTorchDynamoError):
        return "PendingUnbackedSymbolNotFound" in str(error)
    breaks = torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError, symbols.undecided_by_data()
    return isinstance(error, breaks)


@contextlib.contextmanager
def _describable_settings() -> Iterator[None]:
    """Dynamo (2.11) describes its settings in its record of a compilation, cannot sort functions to ignore there, and
    writes that into the log as an error; within, it leaves them out."""
    from torch._dynamo import utils

    describe = getattr(utils, "_get_dynamo_config_for_logging", lambda: None)

    def describe_others() -> Any:
        with torch._dynamo.config.patch(ignore_logging_functions=set()):
            return describe()

    try:
        describe()
        mended: Any = contextlib.nullcontext()
    except TypeError:
        mended = mock.patch.object(utils, "_get_dynamo_config_for_logging", describe_others)
    with mended:
        yield


def core_decompositions() -> dict:
    """What torch takes apart into its core operators."""
    from torch._decomp import core_aten_decompositions

    return dict(core_aten_decompositions())
