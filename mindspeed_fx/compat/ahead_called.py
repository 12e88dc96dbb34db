"""Part of :mod:`mindspeed_fx.compat`: compiled functions in a file that others call, which are made anew where it is
read."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator
from unittest import mock

try:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable, SerializableCallable
except ImportError:  # this torch writes none: ahead.problem()
    SerializableCallable = BundledAOTAutogradSerializableCallable = object


class Called(SerializableCallable):
    """A compiled function that ``outer`` calls.

    Args:
        inner: what AOTAutograd made.
        outside: what ``outer`` is made of; pickle takes it.
        outer: of the arguments; None until :meth:`call_by`.
    """

    def __init__(self, inner: Any, outside: Any, outer: Callable | None = None):
        self.inner, self.outside, self.outer = inner, outside, outer

    def call_by(self, make: Callable[[Any, Callable], Callable]) -> None:
        """Calls go through ``make(outside, inner)`` from here on."""
        self.outer = make(self.outside, self.inner)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Any) -> Any:
        inner = BundledAOTAutogradSerializableCallable(fn.inner)
        return BundledAOTAutogradSerializableCallable.serialize_compile_artifacts(inner), fn.outside

    @classmethod
    def deserialize_compile_artifacts(cls, data: Any) -> Any:
        inner, outside = data
        return cls(BundledAOTAutogradSerializableCallable.deserialize_compile_artifacts(inner), outside)

    def __call__(self, *args: Any) -> Any:
        assert self.outer is not None
        return self.outer(*args)


def called_of(compiled: Any) -> Called | None:
    """Of what :mod:`mindspeed_fx.compat.ahead` compiled or read; None where nothing calls it but the step."""
    function = compiled._artifacts.compiled_fn
    return function if isinstance(function, Called) else None


@contextlib.contextmanager
def guards_written_by(reduce: Callable[[Any], Any]) -> Iterator[None]:
    """Within, guards are pickled with ``reduce(object)``: as ``__reduce__``, or NotImplemented."""
    from torch._dynamo.guards import GuardsStatePickler

    own = GuardsStatePickler.reducer_override

    def reducer_override(self: Any, value: Any) -> Any:
        result = reduce(value)
        return own(self, value) if result is NotImplemented else result

    with mock.patch.object(GuardsStatePickler, "reducer_override", reducer_override):
        yield
