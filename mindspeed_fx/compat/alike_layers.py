"""Layers that are alike are read once by Dynamo, without a mark of the user's: a part of :mod:`mindspeed_fx.compat`.

Reading a layer takes Dynamo as long as all else that is done for it. Modules of one class of which a ``ModuleList`` or
``Sequential`` has many are called as regions are that the user marked by ``torch.compiler.nested_compile_region``: of
each call Dynamo (2.13) compares what the one that was read is guarded by (:mod:`mindspeed_fx.compat.unread_regions`).
A frame in which a region cannot be read, for a graph break or an error inside, is read anew without any, as is one that
fails later: what a region keeps may be an error where the frame ends. A class whose calls keep being different is read
as it is from there on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from typing import Any, Callable, Iterator

import torch
from torch._guards import CompileContext

from mindspeed_fx.compat import dynamo

logger = logging.getLogger(__name__)

FEWEST = 8
"""Modules of one class in a list, from which on reading one for all is worth that what was read is written down."""
MOST_READ = 6
"""Calls of one class that are read as regions: four kinds of layers (dense, sparse, sliding, full) and the first one,
whose input may have no gradient. Classes with more kinds are read as they are."""


class _Layers:
    """Of one frame that Dynamo reads.

    Attributes:
        alike: modules, by id, that are called as regions.
        calls: the module whose call was begun, until its function is called.
        read: by class the calls that were read.
    """

    def __init__(self, alike: dict[int, torch.nn.Module]):
        self.alike = alike
        self.calls: Any = None
        self.read: Counter[type] = Counter()


def read_once(is_wanted: Callable[[Callable, torch.nn.Module], bool]) -> None:
    """Have Dynamo read layers that are alike once, where this torch compares what it did not read (2.13).

    Args:
        is_wanted: of what Dynamo gives its graphs, and a layer.
    """
    try:
        from torch._dynamo.variables import invoke_subgraph as regions
    except ImportError:  # before 2.13
        return
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.functions import UserFunctionVariable
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable as Module

    call_module, call_function = Module.call_function, UserFunctionVariable.call_function
    region = regions.InvokeSubgraphHigherOrderVariable
    read, run = region.create_wrapped_node, InstructionTranslator.run

    @functools.wraps(run)
    def run_frame(self: Any) -> Any:
        with _refusing(f"layers of {self.f_code.co_name}", lambda: _are_read_once(self)):
            return run(self)

    @functools.wraps(call_module)
    def begin(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        layers = _layers_of(tx, is_wanted)
        if layers is None or id(self.value) not in layers.alike or not _may_be_region(tx, layers, self):
            return call_module(self, tx, args, kwargs)
        layers.calls = self
        try:
            return call_module(self, tx, args, kwargs)
        finally:
            layers.calls = None

    @functools.wraps(call_function)
    def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        layers = getattr(tx.output, "_alike_layers", None)
        if layers is None or layers.calls is None or not args or args[0] is not layers.calls:
            return call_function(self, tx, args, kwargs)
        kind = type(layers.calls.value)
        if self.fn is not kind.forward and self.fn is not kind.__call__:  # what looks for its attributes
            return call_function(self, tx, args, kwargs)
        layers.calls = None
        with _refusing(self.fn.__qualname__, lambda: True):
            return _region().call_function(tx, [self, *args], kwargs)

    @functools.wraps(read)
    def create_wrapped_node(self: Any, tx: Any, function: Any, args: Any, *rest: Any, **kwargs: Any) -> Any:
        layers, module = getattr(tx.output, "_alike_layers", None), getattr(args[0], "value", None) if args else None
        if layers is not None and id(module) in layers.alike:
            layers.read[type(module)] += 1
        return read(self, tx, function, args, *rest, **kwargs)

    Module.call_function, UserFunctionVariable.call_function = begin, call
    region.create_wrapped_node, InstructionTranslator.run = create_wrapped_node, run_frame


def _region() -> Any:
    from torch._dynamo.utils import build_invoke_subgraph_variable

    return build_invoke_subgraph_variable()


def _layers_of(tx: Any, is_wanted: Callable[[Callable, torch.nn.Module], bool]) -> _Layers | None:
    """Of the frame that is read; None where its layers are read each."""
    output = tx.output
    if not hasattr(output, "_alike_layers"):
        root = output.root_tx
        is_read_each = output.export or root is None or hasattr(CompileContext.get(), "_reads_layers_each")
        names = {} if is_read_each else dynamo.names_of(root.f_code, root.f_locals, root.f_globals)
        alike = _alike(names, lambda layer: is_wanted(output.compiler_fn, layer))
        output._alike_layers = _Layers(alike) if alike else None
    return output._alike_layers


def _alike(names: dict[str, Any], is_wanted: Callable[[torch.nn.Module], bool]) -> dict[int, torch.nn.Module]:
    """By id the modules of which there are many in a list of what the frame knows by name."""
    alike = {}
    models = [value for value in names.values() if isinstance(value, torch.nn.Module)]
    for layers in (members for model in models for members in _lists(model)):
        of_kind = Counter(map(type, layers))
        kinds = {kind for kind, count in of_kind.items() if count >= FEWEST}
        wanted = {kind: is_wanted(next(m for m in layers if type(m) is kind)) for kind in kinds}
        alike.update({id(m): m for m in layers if wanted.get(type(m))})
    return alike


def _lists(module: torch.nn.Module) -> Iterator[list[torch.nn.Module]]:
    """What lies in the lists of a model; not those within layers, as of experts, whose calls data may decide."""
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
        members = module._modules.values()  # some are None, as x-transformers lists them
        yield [m for m in members if m is not None and any(True for _ in m.children())]
        return
    for child in module.children():
        yield from _lists(child)


def _may_be_region(tx: Any, layers: _Layers, module: Any) -> bool:
    """Whether a call is the frame's own, of a module without hooks whose class is not given up."""
    layer = module.value
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return (
        tx.output.current_tracer.parent is None
        and layers.read[type(layer)] < MOST_READ
        and module.source is not None
        and "forward" not in vars(layer)
        and not hasattr(type(layer).forward, "__marked_compile_region_fn__")
        and not any(hooks)
    )


def _are_read_once(tx: Any) -> bool:
    layers = getattr(tx.output, "_alike_layers", None)
    return layers is not None and bool(layers.read)


@contextlib.contextmanager
def _refusing(what: str, is_read_once: Callable[[], Any]) -> Iterator[None]:
    """Have the frame read anew, every layer for itself, where something fails that regions may be the reason of."""
    from torch._dynamo import exc, utils

    breaks = utils.counters["graph_break"].copy()
    try:
        yield
    except (exc.RestartAnalysis, exc.SkipFrame):
        raise
    except Exception as error:  # a graph break, or whatever is only said of regions
        if not is_read_once():
            raise
        utils.counters["graph_break"] = breaks
        CompileContext.get()._reads_layers_each = True
        why = str(error).strip().partition("\n")[0]
        logger.info("layers are read each, for %s cannot be read once for all: %s", what, why)
        raise exc.UnspecializeRestartAnalysis(restart_reason="layers that are alike are read each") from error
