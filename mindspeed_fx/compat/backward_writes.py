"""Parameters that a backward graph writes in place: part of :mod:`mindspeed_fx.compat`."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Within, AOTAutograd traces a backward that writes a parameter. Before torch 2.12 it traced that write as one that
    autograd records, which of a leaf that requires a gradient is an error; what is compiled is the same.
    """
    from torch._functorch._aot_autograd import graph_capture_wrappers as wrappers

    tag = getattr(wrappers, "set_partitioner_tag_must_be_in_backward", None)  # entered around each of those writes
    if tag is None or _has_name(wrappers.create_functionalized_fn.__code__, "no_grad"):
        yield
        return

    @contextlib.contextmanager
    def unrecorded() -> Iterator[None]:
        with tag(), torch.no_grad():
            yield

    with mock.patch.object(wrappers, "set_partitioner_tag_must_be_in_backward", unrecorded):
        yield


def _has_name(code: Any, name: str) -> bool:
    """Whether a function, or one inside it, reads ``name``."""
    return name in code.co_names or any(_has_name(c, name) for c in code.co_consts if hasattr(c, "co_names"))
