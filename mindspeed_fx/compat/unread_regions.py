"""Marked regions (``torch.compiler.nested_compile_region``) that Dynamo takes as read.

Torch 2.13 reads a region once and takes it for later calls where what it was guarded by holds of them: of layer 5 where
layer 0 was read. It compares less than it read, and guards nothing of layer 5:

- neither the types of modules inside a layer nor their hooks are compared, whose guards have another source than what
  was read: ``layers[5].act`` may be a ReLU, and is computed as the SiLU of layer 0;
- with ``layers[5].act`` replaced or ``layers[5].eval()`` afterwards, the compiled model goes on as before;
- neither what the frame itself writes between two calls (``layer.scale = i`` in the loop over the layers) is compared,
  nor what it knows by other names, nor whether calls are within autocast (:mod:`mindspeed_fx.compat.region_reads`).

These are wrong values without a word. Here everything that is guarded of a region's arguments is compared, and guarded
of those that were not read. A region that differs in more ways than torch keeps is read for every further call, which
is an error of torch's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from typing import Any, Callable, Iterable, Iterator

from mindspeed_fx.compat import dynamo, region_lookup, region_reads, region_results

logger = logging.getLogger(__name__)

Check = tuple[Any, Any, Any, Any]
"""Of a guard its source, how values are compared, what is expected, and the guard."""


def guard() -> None:
    """Have Dynamo take a region as read for what is the same alone, and guard it, where it compiles for this package:
    for its backend, or to trace a model for a plan. Nothing changes where this torch reads every region.
    """
    try:
        from torch._dynamo.variables import invoke_subgraph as regions
    except ImportError:  # before 2.13
        return
    build, reuse, save = regions.build_reuse_condition, regions.is_reusable, regions.save_reuse_entry
    describe, call = regions.build_input_fingerprint, regions.stamp_out_subgraph

    @functools.wraps(build)
    def build_reuse_condition(tx: Any, fingerprint: Any, traced: Any) -> Any:
        if not _compiles_here(tx):
            return build(tx, fingerprint, traced)
        return _condition(tx, fingerprint, traced, build)

    @functools.wraps(reuse)
    def is_reusable(tx: Any, condition: Any, fingerprint: Any, read: Any) -> bool:
        with region_lookup.rewriting_once():
            if not _compiles_here(tx):
                return reuse(tx, condition, fingerprint, read)
            if condition.writes != region_reads.writes(tx.output) or not reuse(tx, condition, fingerprint, read):
                return False
            replaced = regions.build_source_replacement(read.arg_sources, fingerprint.arg_sources)
            captured = [c.source for c in read.subgraph_input_mapping if isinstance(c, regions.LiftedCapturedSource)]
            return _take(tx, condition, captured, lambda s: s.clone(lambda part: replaced.get(part, part)))

    @functools.wraps(save)
    def save_reuse_entry(tx: Any, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            save(tx, function, *args, **kwargs)
        except AssertionError:  # it reads what the frame computed of a weight (``self.weight.T``) without an argument
            if not _compiles_here(tx):
                raise
        except RuntimeError as error:
            if not _compiles_here(tx) or "maximum reuse entries" not in str(error):
                raise
            marked = getattr(function, "fn", None)
            if hasattr(marked, "__marked_compile_region_max_reuse_entries__"):
                _tell(marked.__qualname__)

    @functools.wraps(describe)
    def build_input_fingerprint(tx: Any, *args: Any) -> Any:
        fingerprint = describe(tx, *args)
        same = region_reads.same_arguments(fingerprint)
        return fingerprint._replace(treespec=(fingerprint.treespec, same, region_reads.around(tx)))

    @functools.wraps(call)
    def stamp_out_subgraph(tx: Any, fingerprint: Any, read: Any) -> Any:
        sizes = [part.expr for part in read.subgraph_input_mapping if isinstance(part, regions.LiftedBoundSymbol)]
        with _numbers_bound(tx.output.current_tracer.bound_symbols, sizes):
            return call(tx, fingerprint, read)

    regions.build_reuse_condition, regions.is_reusable = build_reuse_condition, is_reusable
    regions.build_input_fingerprint, regions.stamp_out_subgraph = build_input_fingerprint, stamp_out_subgraph
    regions.save_reuse_entry = save_reuse_entry
    region_reads.count_writes()
    region_reads.keep_reads_within()
    region_lookup.remember_rewriting()
    region_lookup.flatten_directly(regions)
    region_results.are_no_leaves(regions)


@functools.cache
def _tell(region: str) -> None:
    logger.warning(
        "the marked region %s is read for every call from here on: its calls differ in more ways than "
        "max_reuse_entries of torch.compiler.nested_compile_region keeps",
        region,
    )


def _compiles_here(tx: Any) -> bool:
    module = str(getattr(dynamo.function_of(tx.output.compiler_fn), "__module__", ""))
    return module.partition(".")[0] == __name__.partition(".")[0]


def _condition(tx: Any, fingerprint: Any, traced: Any, build: Callable) -> Any:
    """What holds of the region that was read; None where that cannot be told, and no other call is taken for it."""
    try:
        condition = build(tx, fingerprint, traced)
    except RuntimeError:  # a guard that is not for one object alone
        return None
    if condition is None or (missing := _missing(tx, fingerprint, condition)) is None:
        return None
    condition = dataclasses.replace(condition, guards=[*condition.guards, *missing])
    arguments = [s for s in fingerprint.arg_sources if s is not None]
    condition.sources = [*(source for source, *_ in condition.guards), *traced, *arguments]
    condition.known = region_reads.known_otherwise(tx, {*traced, *arguments})
    condition.writes = region_reads.writes(tx.output)
    if _has_written(tx, condition.sources) or region_reads.reads_argument_otherwise(tx, fingerprint, traced):
        return None
    return condition


@contextlib.contextmanager
def _numbers_bound(bound: dict[Any, Any], sizes: Iterable[Any]) -> Iterator[None]:
    """Within, sizes that a region was read with as symbols, and that turned out to be numbers, are inputs as such: with
    ``dynamic=True`` a weight tells the last size of the first layer's input. Torch has no input for them."""
    numbers = {size: int(size) for size in sizes if size.is_Integer and size not in bound}
    bound.update(numbers)
    try:
        yield
    finally:
        for number in numbers:
            del bound[number]


def _has_written(tx: Any, sources: Iterable[Any]) -> bool:
    """Whether the frame has written into what lies at ``sources``, or on the way there."""
    written = region_reads.written(tx)
    return bool(written) and bool(written & region_reads.reached(tx, sources))


def _take(tx: Any, condition: Any, captured: list[Any], moved: Callable[[Any], Any]) -> bool:
    """Take another call for the region that was read, ``moved`` there, and guard it; False where it is not alike."""
    if _has_written(tx, map(moved, condition.sources)):
        return False
    if any(_is_constant(tx, moved(source)) for source in captured):
        return False
    if not region_reads.are_same(tx, condition.known, moved):
        return False
    here = [(moved(source), guard) for source, _, _, guard in condition.guards if moved(source) != source]
    for source, guard in here:
        _guard_alike(source, guard)
    inputs = {moved(source).name for source in captured}
    tensors = {s.name: s for s, guard in here if guard.create_fn_name() == "TENSOR_MATCH" and s.name not in inputs}
    for _, source in sorted(tensors.items()):  # only looked at; guards are in no order, inputs must be
        _build(tx, source)
    tx.output.current_tracer.traced_sources.update(map(moved, condition.traced_sources))  # of a region around it
    return True


def _missing(tx: Any, fingerprint: Any, condition: Any) -> list[Check] | None:
    """What is guarded of a region's arguments, and not compared; None where something of it cannot be."""
    from torch._dynamo.guards import GUARD_VALUE_DISPATCH, SKIP_GUARD, GuardCheckSpec
    from torch._dynamo.source import is_from_source

    known, missing = {id(g) for *_, g in condition.guards}, []
    for guard in tx.output.guards:
        source, how = guard.originating_source, GUARD_VALUE_DISPATCH.get(guard.create_fn_name())
        if id(guard) in known or how is SKIP_GUARD:
            continue
        if not any(s is not None and is_from_source(source, s) for s in fingerprint.arg_sources):
            continue
        if not isinstance(how, GuardCheckSpec):
            return None
        missing.append((source, how, how.get_metadata_fn(guard, tx.output.resolve_source_value(source)), guard))
    return missing


def _guard_alike(source: Any, guard: Any) -> None:
    """Install a guard like another, of another source; tensors are guarded as they become inputs of the graph."""
    from torch._dynamo.guards import install_guard

    if guard.create_fn_name() != "TENSOR_MATCH":
        alike = source.make_guard(guard.create_fn)
        alike.user_stack = guard.user_stack  # the lines that read it, which take long to tell
        install_guard(alike)


def _build(tx: Any, source: Any) -> Any:
    """What Dynamo makes of an object of the caller's: an input of the graph of a tensor, which is none at the end if
    nothing uses it."""
    from torch._dynamo.variables.builder import VariableBuilder

    return VariableBuilder(tx, source)(tx.output.resolve_source_value(source))


def _is_constant(tx: Any, source: Any) -> bool:
    """Whether an input is a number that Dynamo takes for a constant there. A region that was read with it as an input,
    because it had changed, ends in an error if it is taken for such a layer."""
    value = tx.output.resolve_source_value(source)
    return isinstance(value, int | float) and _build(tx, source).is_python_constant()
