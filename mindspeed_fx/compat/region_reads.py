"""What a marked region (``torch.compiler.nested_compile_region``) reads that no guard of it tells: a part of
:mod:`mindspeed_fx.compat`.

- Objects that the frame reads by another name, too: ``layers[0].config`` is ``model.config``, and everything read of it
  is guarded by that name, which layer 5 with a configuration of its own does not have.
- What the frame has written by then, and since: guards compare what was there before.
- What is read and written within a checkpoint, or another region, inside of it: torch forgets it with that one.
- Which of its arguments are the same, and whether one is a weight of the layer.
- The settings that it is called in, of autocast and gradients.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, Iterable, Iterator

import torch

Names = list[tuple[Any, Any]]
"""Of objects the source that a region reads, and the one by which the frame knows the object."""


def keep_reads_within() -> None:
    """Count what the body of a higher-order operator reads and writes to the body that it is called in."""
    from torch._dynamo.output_graph import OutputGraph

    inside = OutputGraph.subtracer

    @functools.wraps(inside)
    @contextlib.contextmanager
    def subtracer(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        outer = self.current_tracer
        with inside(self, *args, **kwargs) as inner:
            try:
                yield inner
            finally:
                outer.traced_sources.update(inner.traced_sources)
                outer.side_effect_stack = outer.side_effect_stack or inner.side_effect_stack

    OutputGraph.subtracer = subtracer


def same_arguments(fingerprint: Any) -> tuple[Any, ...]:
    """For every argument the first one that is the same: of ``layer(x, x)`` the body has one input. Of constants the
    type and what is written for them, for 1 is True and 1.0."""
    first: dict[Any, int] = {}
    result: list[Any] = []
    for i, (_, vt) in enumerate(fingerprint.flat_vts):
        if vt.is_python_constant():
            result.append((type(vt.value), repr(vt.value)))
        else:
            result.append(first.setdefault(vt.as_proxy().node if hasattr(vt, "proxy") else id(vt.value), i))
    return tuple(result)


def reads_argument_otherwise(tx: Any, fingerprint: Any, sources: Iterable[Any]) -> bool:
    """Whether a region may have read a tensor that it is given by another name, too, of which the body has one input:
    the layer's own weight, as ``layer(x, layer.weight)`` gives it."""
    from torch._dynamo.source import is_from_source

    values: dict[Any, Any] = {}
    modules = [vt.source for _, vt in fingerprint.flat_vts if not hasattr(vt, "proxy") and vt.source is not None]
    tensors = [vt.source for _, vt in fingerprint.flat_vts if hasattr(vt, "proxy") and vt.source is not None]
    if any(is_from_source(source, module) for source in tensors for module in modules):
        return True
    names = {id(_value(tx, source, values)): source.name for source in tensors}
    return any(names.get(id(_value(tx, s, values)), s.name) != s.name for s in sources) if names else False


def around(tx: Any) -> tuple[Any, ...]:
    """The settings that a region is called in."""
    cast = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", _accelerator())]
    modes = [type(mode) for mode in tx.symbolic_torch_function_state.mode_stack]
    grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return *grad, torch.get_default_dtype(), cast, modes, is_transformed()


def is_transformed() -> bool:
    """Whether the frame is within a transformation of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@functools.cache
def _accelerator() -> str:
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def count_writes() -> None:
    """Count what a frame writes into the caller's objects, globals and variables of outer functions."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    def counting(write: Callable) -> Callable:
        @functools.wraps(write)
        def counted(self: Any, variable: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(variable.mutation_type, AttributeMutationExisting | ValueMutationExisting):
                output = self.output_graph_weakref()
                output._region_writes = writes(output) + 1
            return write(self, variable, *args, **kwargs)

        return counted

    SideEffects.store_attr, SideEffects.mutation = counting(SideEffects.store_attr), counting(SideEffects.mutation)


def writes(output: Any) -> int:
    """How often the frame of this graph has written so far."""
    return getattr(output, "_region_writes", 0)


def written(tx: Any) -> set[int]:
    """By id the caller's objects that the frame has written into so far. Globals and variables of outer functions are
    the same for every call of a region."""
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects, objects = tx.output.side_effects, set()
    for item, values in effects.store_attr_mutations.items():
        if values and isinstance(item.mutation_type, AttributeMutationExisting) and hasattr(item, "value"):
            objects.add(id(item.value))
    for number, item in effects.id_to_variable.items():
        if isinstance(item.mutation_type, ValueMutationExisting) and item.mutation_type.is_modified:
            objects.add(number)
    return objects


def reached(tx: Any, sources: Iterable[Any]) -> set[int]:
    """By id what is at ``sources``, and on the way there."""
    values: dict[Any, Any] = {}
    for source in sources:
        _value(tx, source, values)
    return set(map(id, values.values()))


def known_otherwise(tx: Any, sources: Iterable[Any]) -> Names:
    """Of ``sources`` those whose objects the frame knows by another name."""
    effects, names, values = tx.output.side_effects, [], {}
    for source in sources:
        value = _value(tx, source, values)
        known = effects[value].source if value in effects else None
        if known is not None and known.name != source.name:  # one path is several sources
            names.append((source, known))
    return names


def are_same(tx: Any, names: Names, moved: Callable[[Any], Any]) -> bool:
    """Whether the objects are known by these names for the call that ``moved`` is of, too; that is guarded then."""
    from torch._dynamo.guards import install_guard, make_dupe_guard

    values: dict[Any, Any] = {}
    pairs = [(moved(source), moved(known)) for source, known in names]
    pairs = [pair for pair, old in zip(pairs, names, strict=True) if pair != old]
    if any(_value(tx, source, values) is not _value(tx, known, values) for source, known in pairs):
        return False
    for source, known in pairs:
        if how := make_dupe_guard(source, known):
            install_guard(source.make_guard(how))
    return True


def _value(tx: Any, source: Any, values: dict[Any, Any]) -> Any:
    root = tx.output.root_tx
    return source.get_value({"G": root.f_globals, "L": root.f_locals}, {}, values)
