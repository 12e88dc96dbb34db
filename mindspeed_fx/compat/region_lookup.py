"""Marked regions (``torch.compiler.nested_compile_region``) looked up fast: a part of :mod:`mindspeed_fx.compat`.

Of every call torch 2.13 compares what the region was guarded by when it was read. It spends as long on that as on
reading a layer of a Llama: each guard's source is rewritten from its root on, for each of hundreds of guards, and the
arguments are flattened by reading the Python of ``pytree``. What is compared, and told, is the same here
(benchmarks/results/2026-11-30-first_step.txt).
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from typing import Any, Iterator

_rewritten: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar("rewritten", default=None)
"""Source -> what it is rewritten to, within :func:`rewriting_once`."""


@contextlib.contextmanager
def rewriting_once() -> Iterator[None]:
    """Within, ``source.clone(transform)`` is called with one transform alone, and remembers."""
    token = _rewritten.set({})
    try:
        yield
    finally:
        _rewritten.reset(token)


def remember_rewriting() -> None:
    """Have sources remember what they were rewritten to, within :func:`rewriting_once`."""
    from torch._guards import ChainedSource, Source

    rewrite = ChainedSource.clone

    @functools.wraps(rewrite)
    def clone(self: Any, transform_fn: Any = None) -> Any:
        known = _rewritten.get()
        if known is None or transform_fn is None:
            return rewrite(self, transform_fn)
        if (result := known.get(self)) is None:
            changed = {}
            for field in _fields(type(self)):
                value = getattr(self, field)
                if isinstance(value, Source) and (new := value.clone(transform_fn)) is not value:
                    changed[field] = new
            result = transform_fn(dataclasses.replace(self, **changed) if changed else self)
            known[self] = result
        return result

    ChainedSource.clone = clone


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def flatten_directly(regions: Any) -> None:
    """Have arguments of regions flattened by a walk over tuples, lists and dicts; ``pytree`` is read for others."""
    flatten = regions.build_fingerprint_with_pytree

    @functools.wraps(flatten)
    def build_fingerprint_with_pytree(tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        leaves: list[Any] = []
        try:
            shape = tuple(_flatten(regions, vt, leaves) for vt in args)
            named = tuple((name, _flatten(regions, vt, leaves)) for name, vt in kwargs.items())
        except _OtherContainer:
            return flatten(tx, args, kwargs)
        flat = [(regions.classify_vt(vt), vt) for vt in leaves]
        sources = [getattr(vt, "source", None) for vt in leaves]
        return regions.InputFingerprint(flat, sources, False, (shape, named))

    regions.build_fingerprint_with_pytree = build_fingerprint_with_pytree


class _OtherContainer(Exception):
    """Of a class that pytree may know."""


def _flatten(regions: Any, vt: Any, leaves: list[Any]) -> Any:
    """Appends the leaves of one argument; what it is made of, to be compared."""
    from torch._dynamo.variables.dicts import ConstDictVariable

    vt = vt.realize()
    if regions.classify_vt(vt) is not None:
        leaves.append(vt)
        return None
    if vt.source is not None:  # what reads a container of the caller's guards it
        raise _OtherContainer
    if type(vt) in (regions.ListVariable, regions.TupleVariable):
        return type(vt), tuple(_flatten(regions, item, leaves) for item in vt.items)
    if type(vt) is ConstDictVariable and vt.user_cls is dict:
        items = [(key.vt, value) for key, value in vt.items.items()]
        if all(key.is_python_constant() for key, _ in items):
            return dict, tuple((key.as_python_constant(), _flatten(regions, v, leaves)) for key, v in items)
    raise _OtherContainer
