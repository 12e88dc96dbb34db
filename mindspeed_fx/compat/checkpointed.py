"""Checkpointed regions of a parallelized model, recorded by torch.compile or run for all ranks of one process."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch

from mindspeed_fx.compat import dtensor, tracing


def planned_graph(planned: Callable[[Any], Any], body: Any) -> Any:
    """A graph for a higher-order operator, in the place of its ``body``, that runs ``planned(body).run(...)``."""

    class Body(torch.nn.Module):
        def forward(self, *values: Any) -> Any:
            return planned(body).run(*values)

    wrapped = dtensor.as_graph(Body(), body)
    wrapped.meta.update(body.meta)
    return wrapped


def run_checkpointed(planned: Callable[[Any], Any], args: tuple, kwargs: dict) -> Any:
    """A checkpointed region whose body runs as ``planned(body).run(...)``. Torch's operator leaves it to compiled code
    to draw the same numbers again in the backward; under LocalTensorMode, where nothing is compiled, the states of the
    generators are kept for it.
    """
    from torch._higher_order_ops.wrap import tag_activation_checkpoint
    from torch.distributed._local_tensor import local_tensor_mode
    from torch.utils.checkpoint import checkpoint, noop_context_fn

    body, *arg = args
    wrapped = planned_graph(planned, body)
    if (mode := local_tensor_mode()) is None:
        return tag_activation_checkpoint(wrapped, *arg, **kwargs)
    states = dict(mode._per_rank_rng_states)

    def contexts() -> tuple[Any, Any]:
        forward, again = body.meta.get("_checkpoint_context_fn", noop_context_fn)()
        return forward, _drawing_from(states, mode, again)

    settings = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": False, "context_fn": contexts}
    return checkpoint(wrapped, *arg, **{**kwargs, **settings})


@contextlib.contextmanager
def _drawing_from(states: dict[int, Any], mode: Any, inner: Any) -> Iterator[None]:
    """Each rank's generator starts from its state of ``states`` within, and goes on afterwards from where it was."""
    before = dict(mode._per_rank_rng_states)
    with tracing.outside_tracing():
        last = torch.get_rng_state()
    mode._per_rank_rng_states.update(states)
    try:
        with inner:
            yield
    finally:
        mode._per_rank_rng_states.update(before)
        with tracing.outside_tracing():
            torch.set_rng_state(last)
