"""Marked regions (``torch.compiler.nested_compile_region``) that Dynamo takes as read.

Torch 2.13 reads a region once and takes it for later calls where what it was guarded by holds of them: of layer 5 where
layer 0 was read. It compares less than it read, and guards nothing of layer 5:

- neither the types of modules inside a layer nor their hooks are compared, whose guards have another source than what
  was read: ``layers[5].act`` may be a ReLU, and is computed as the SiLU of layer 0;
- with ``layers[5].act`` replaced or ``layers[5].eval()`` afterwards, the compiled model goes on as before.

Both are wrong values without a word. Here everything that is guarded of a region's arguments is compared, and guarded
of those that were not read. A region that differs in more ways than torch keeps is read for every further call, which
is an error of torch's own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from mindspeed_fx.compat import dynamo, region_lookup

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

    @functools.wraps(build)
    def build_reuse_condition(tx: Any, fingerprint: Any, traced: Any) -> Any:
        condition = build(tx, fingerprint, traced)
        if condition is None or not _compiles_here(tx):
            return condition
        missing = _missing(tx, fingerprint, condition)
        return None if missing is None else dataclasses.replace(condition, guards=[*condition.guards, *missing])

    @functools.wraps(reuse)
    def is_reusable(tx: Any, condition: Any, fingerprint: Any, read: Any) -> bool:
        with region_lookup.rewriting_once():
            return reuse(tx, condition, fingerprint, read) and (
                not _compiles_here(tx) or is_guarded(tx, condition, fingerprint, read)
            )

    def is_guarded(tx: Any, condition: Any, fingerprint: Any, read: Any) -> bool:
        """Whether the call is guarded as what was read is, now; not where it cannot be."""
        replaced = regions.build_source_replacement(read.arg_sources, fingerprint.arg_sources)

        def moved(source: Any) -> Any:
            return source.clone(lambda s: replaced.get(s, s))

        for captured in read.subgraph_input_mapping:
            if isinstance(captured, regions.LiftedCapturedSource) and _is_constant(tx, moved(captured.source)):
                return False
        for source, _, _, guard in condition.guards:
            here = moved(source)
            if here != source:
                _guard_alike(here, guard)
        return True

    @functools.wraps(save)
    def save_reuse_entry(tx: Any, function: Any, *args: Any, **kwargs: Any) -> None:
        try:
            save(tx, function, *args, **kwargs)
        except RuntimeError as error:
            if not _compiles_here(tx) or "maximum reuse entries" not in str(error):
                raise
            _tell(getattr(getattr(function, "fn", None), "__qualname__", "of a function"))

    regions.build_reuse_condition, regions.is_reusable = build_reuse_condition, is_reusable
    regions.save_reuse_entry = save_reuse_entry
    region_lookup.remember_rewriting()
    region_lookup.flatten_directly(regions)


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
    """Install a guard like another, of another source. Tensors become inputs of the graph, which Dynamo guards
    itself."""
    from torch._dynamo.guards import install_guard

    if guard.create_fn_name() != "TENSOR_MATCH":
        alike = source.make_guard(guard.create_fn)
        alike.user_stack = guard.user_stack  # the lines that read it, which take long to tell
        install_guard(alike)


def _is_constant(tx: Any, source: Any) -> bool:
    """Whether an input is a number that Dynamo takes for a constant there. A region that was read with it as an input,
    because it had changed, ends in an error if it is taken for such a layer."""
    from torch._dynamo.variables.builder import VariableBuilder

    value = tx.output.resolve_source_value(source)
    return isinstance(value, int | float) and VariableBuilder(tx, source)(value).is_python_constant()
