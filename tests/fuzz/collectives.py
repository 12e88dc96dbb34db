"""Collectives over the one rank of a group: graphs with what sends and waits, whose values a process alone has too."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch.distributed as dist

from .program import SETUP
from .writer import HIDDEN, Writer


def over_ranks(w: Writer, x: str) -> str:
    """Two linear layers around something that is sent."""
    if "GROUP" not in w.space:
        exec(SETUP, w.space)
    y = w.linear(x, HIDDEN)
    text = w.random.choice(
        [
            "funcol.all_gather_tensor_autograd({}, 0, GROUP)",
            'funcol.reduce_scatter_tensor_autograd({}, "sum", 1, GROUP)',
            "funcol.all_to_all_single_autograd({}, None, None, GROUP)",
            '{0} * funcol.all_reduce({0}.detach().abs().mean(), "avg", GROUP)',
            "{0} * funcol.all_gather_tensor({0} > 0, 1, GROUP)",
            'torch.where(funcol.all_reduce(({0} > 0).to(torch.int32), "max", GROUP) > 0, {0}, 0.0)',
        ]
    )
    return w.linear(w.emit("F.silu({})", w.emit(text, y)), HIDDEN)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A group that a program makes inside ends with it."""
    before = dist.is_initialized()
    try:
        yield
    finally:
        if not before and dist.is_initialized():
            dist.destroy_process_group()
