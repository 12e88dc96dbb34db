"""Shapes of DTensor's results, which some releases of torch leave traces of: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Within, DTensor calls an operator of whole sizes for its result's shape outside of the trace. Before torch 2.13
    the graph got that call too, on memory that nobody wrote: dead, and yet a node that readers take for the model's."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    propagator = DTensor._op_dispatcher.sharding_propagator
    shapes = type(propagator)._propagate_tensor_meta_non_cached
    if disable_proxy_modes_tracing.__name__ in shapes.__code__.co_names:
        yield
        return

    def shapes_alone(self: Any, schema: Any) -> Any:
        with disable_proxy_modes_tracing():
            return shapes(self, schema)

    type(propagator)._propagate_tensor_meta_non_cached = shapes_alone
    try:
        yield
    finally:
        type(propagator)._propagate_tensor_meta_non_cached = shapes
