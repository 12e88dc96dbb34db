"""Fake values: their mode, their memory, and their layout as far as it means something."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import autocast

# --------------------------------------------------------------------------- fake values


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a fake tensor: views of one tensor share it."""
    return tensor.untyped_storage()._cdata


def fake_like(value: Any) -> Any:
    """The fake mode that ``value`` was made under, as a context; nothing when it is real."""
    from torch._subclasses.fake_tensor import FakeTensor

    mode = next((v.fake_mode for v in pytree.tree_leaves(value) if isinstance(v, FakeTensor)), None)
    return mode if mode is not None else contextlib.nullcontext()


@contextlib.contextmanager
def remembering_calls() -> Iterator[None]:
    """Meanwhile fake modes remember what our operators and the collectives return, as they do of ATen's: layers that
    are alike ask for the same again and again, and to work it out takes three times as long as to know it.

    Torch trusts ATen's operators alone, since a fake of somebody else may be replaced; these are not. Left out is what
    depends on more than its arguments: where an operator is told a group's name alone, the number of ranks.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    own = FakeTensorMode._validate_cache_key

    @functools.wraps(own)
    def validate(mode: Any, func: Any, args: Any, kwargs: Any) -> None:
        if not (isinstance(func, torch._ops.OpOverload) and _depends_on_arguments_alone(func)):
            own(mode, func, args, kwargs)

    with mock.patch.object(FakeTensorMode, "_validate_cache_key", validate):
        yield


_COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "wait_tensor")
"""Functional collectives that are told how many ranks there are, or need not know it."""


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Without torch's log of operators that have no value, a traceback each, where who fails is asked again."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@functools.cache
def _depends_on_arguments_alone(func: torch._ops.OpOverload) -> bool:
    """Whether what an operator returns, the numbers aside, follows from its arguments."""
    unfit = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    schema = func._schema
    if unfit & set(func.tags) or schema.is_mutable or any(r.alias_info for r in schema.returns):
        return False
    if func.namespace == "_c10d_functional":
        return func._opname in _COLLECTIVES
    return func.namespace == "mindspeed" and not any(a.name == "group" for a in schema.arguments)


def is_fake(value: Any) -> bool:
    """Whether ``value`` is a tensor without numbers, on whatever device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)


def layout(tensor: torch.Tensor) -> tuple:
    """Strides that mean something: those of dimensions longer than one, as text, so that symbols compare without
    guards.
    """
    return tuple(0 if isinstance(n, int) and n <= 1 else str(s) for n, s in zip(tensor.shape, tensor.stride()))


def hint(size: Any) -> int:
    """A plausible integer for a symbolic size, also for a ragged one, which has no number; adds no guard."""
    if isinstance(size, int):
        return size
    known = size.node.hint if hasattr(size, "node") else None
    return 4096 if known is None or isinstance(known, torch.SymInt) else int(known)


def refresh_values(gm: fx.GraphModule) -> None:
    """Recompute the fake value of every ATen call whose inputs' layout changed, so that strides stay true; under the
    autocast that is in force there, which gives an ``einsum`` its dtype.
    """
    from torch._dispatch.python import enable_python_dispatcher

    stale: set[fx.Node] = set()
    with autocast.following_autocast() as follow:
        for node in gm.graph.nodes:
            if node.op != "call_function" or follow(node) or not isinstance(node.target, torch._ops.OpOverload):
                continue
            old = node.meta.get("val")
            if not isinstance(old, torch.Tensor) or node.target._schema.is_mutable:
                continue
            if not node.meta.get("fresh") and not any(a in stale for a in node.all_input_nodes):
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            # Without Python's dispatcher some operators (constant_pad_nd) take no symbol for a size.
            python = enable_python_dispatcher() if has_symbols([*args, old]) else contextlib.nullcontext()
            with fake_like(old), torch.no_grad(), python:
                new = node.target(*args, **kwargs)
            if new.stride() != old.stride() or new.dtype != old.dtype or node.meta.pop("fresh", False):
                node.meta["val"] = new
                stale.add(node)


def take_layouts(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give placeholders the strides of ``inputs``, and what is computed of them those that follow.

    A backward is traced before its forward is compiled, which may lay out what it saves otherwise (channels last for
    convolutions). Where a view is none of the new strides it becomes one of a copy.
    """
    stale: set[fx.Node] = set()
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs):
        old = node.meta.get("val")
        if is_fake(value) and is_fake(old) and not has_symbols([old]) and value.stride() != old.stride():
            node.meta["val"] = value
            stale.add(node)
    if stale:
        follow_layouts(gm, stale)


def follow_layouts(gm: fx.GraphModule, stale: set[fx.Node]) -> None:
    """Recompute the fake value of all that is computed of ``stale``, whose strides are others than they were, under
    the autocast that is in force there. Where a view is none of the new strides it becomes one of a copy."""
    with autocast.following_autocast() as follow:
        for node in list(gm.graph.nodes):
            known = all("val" in a.meta for a in node.all_input_nodes) and not node.meta.get("unbacked_bindings")
            if follow(node) or not known or stale.isdisjoint(node.all_input_nodes):
                continue
            if isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable:
                _copy_before_view(gm.graph, node)
            elif node.target is not operator.getitem:
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with fake_like(node.meta["val"]), torch.no_grad():
                new = node.target(*args, **kwargs)
            if _layouts(new) != _layouts(node.meta["val"]) or _storages(new) & _storages(args):
                node.meta["val"] = new
                stale.add(node)


def _layouts(value: Any) -> list[tuple]:
    return [layout_key(v) for v in pytree.tree_leaves(value)]


def _storages(value: Any) -> set[int]:
    return {storage_of(v) for v in pytree.tree_leaves(value) if is_fake(v) and v.layout is torch.strided}


def _copy_before_view(graph: fx.Graph, node: fx.Node) -> None:
    """Make ``node`` a view of a contiguous copy, where it is one that its argument's strides do not allow."""
    if node.target not in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
        return
    value = node.args[0].meta["val"]
    with fake_like(value), torch.no_grad():
        if storage_of(value.reshape(node.args[1])) == storage_of(value):
            return
        copy = value.clone(memory_format=torch.contiguous_format)
    with graph.inserting_before(node):
        how = {"memory_format": torch.contiguous_format}
        call = graph.call_function(torch.ops.aten.clone.default, node.args[:1], how)
    call.meta = {**node.meta, "val": copy}
    node.args = (call, *node.args[1:])


def reshape_views(gm: fx.GraphModule) -> None:
    """Let a graph that runs operator by operator copy where a view fails: some kernels lay out their results otherwise
    than their fake forms say (torch 2.11 to 2.13: the gradient of softplus of a transposed tensor, as Doge's). Where a
    view is possible ``reshape`` is that view."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    gm.recompile()


def has_symbols(values: Any) -> bool:
    """Whether some of the sizes, or of the tensors' sizes, are symbols."""
    leaves = pytree.tree_leaves(values)
    shapes = [v.shape for v in leaves if isinstance(v, torch.Tensor)]
    sizes = [*leaves, *(n for shape in shapes for n in shape)]
    return any(isinstance(n, torch.SymInt) for n in sizes)


def layout_key(value: Any) -> tuple:
    """Equal for fake values that every trace treats alike."""
    if isinstance(value, torch.Tensor):
        return (str(value.shape), str(value.stride()), value.dtype, value.device, str(value.storage_offset()))
    return (str(value),)


# --------------------------------------------------------------------------- fake models


def new_mode() -> Any:
    """A mode for fake tensors, as a context, in which real tensors may be met too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def tensor_like(mode: Any, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A fake tensor of another shape, dense unless the shape is the tensor's own."""
    if tuple(shape) == tuple(tensor.shape):
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:
        return torch.empty(tuple(shape), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)


def copy_module(mode: Any, module: torch.nn.Module) -> torch.nn.Module:
    """``module`` with fake parameters and buffers; it shares nothing with the original."""
    import copy

    from torch._subclasses.fake_tensor import FakeCopyMode

    with FakeCopyMode(mode):
        return copy.deepcopy(module)


def memory_order(x: torch.Tensor) -> list[int]:
    """Dimensions of ``x``, outermost in memory first, as elementwise operators lay out a result like it."""
    from torch._prims_common import compute_elementwise_output_logical_to_physical_perm as order_of

    order = order_of(x, _skip_checks=True)
    return list(order[0] if isinstance(order, tuple) else order)  # torch 2.11 tells no ambiguity


# --------------------------------------------------------------------------- values of copied calls


def past_modes() -> Any:
    """A context in which no mode sees what is called; :func:`fresh` takes a tenth of its time there."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def match_storages(old: Any, new: Any, storages: dict[int, Any]) -> None:
    """Note that what lies in the memory of ``old`` lies in that of ``new`` for a copy of a call."""
    for a, b in zip(_leaves(old), _leaves(new)):
        if _lies_in_memory(a):
            storages.setdefault(storage_of(a), b.untyped_storage())


def fresh(value: Any, storages: dict[int, Any]) -> Any:
    """A fake value like ``value`` for a copy of the call that makes it: of its sizes, strides and type, in the memory
    that ``storages`` names for the memory of ``value``, else in memory of its own, which is added there.
    """
    return _for_each(lambda x: _fresh(x, storages), value)


def moved(value: Any, storages: dict[int, Any]) -> Any:
    """``value``, and a fake value like it where its memory is one that ``storages`` has another for."""
    if not storages:
        return value
    return _for_each(lambda x: _fresh(x, storages) if storage_of(x) in storages else x, value)


def _for_each(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of each fake tensor of it; one tensor, the usual case, without the walk."""
    return function(value) if _lies_in_memory(value) else pytree.tree_map_only(_lies_in_memory, function, value)


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)


def _lies_in_memory(value: Any) -> bool:
    return is_fake(value) and value.layout is torch.strided


def _fresh(x: Any, storages: dict[int, Any]) -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    storage = storages.get(storage_of(x))
    if storage is None:
        storage = storages[storage_of(x)] = torch.UntypedStorage(x.untyped_storage().nbytes(), device="meta")
    on_meta = torch.empty(0, dtype=x.dtype, device="meta").set_(storage, x.storage_offset(), x.size(), x.stride())
    return FakeTensor(x.fake_mode, on_meta, x.fake_device)
