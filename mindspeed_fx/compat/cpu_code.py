"""Part of :mod:`mindspeed_fx.compat`: what is different while Inductor writes the code of our graphs for the CPU; the
backend "inductor" stays as it is.
"""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Sequence

import torch

from mindspeed_fx.compat import convolutions, vector_random


@contextlib.contextmanager
def written(inputs: Sequence[Any]) -> Iterator[None]:
    """Meanwhile a graph is lowered whose ``inputs`` are these; nothing is different where one is on another device."""
    if any(x.device.type != "cpu" for x in inputs if isinstance(x, torch.Tensor)):
        yield
        return
    from mindspeed_fx.compat import kernel_library  # imports Inductor

    with kernel_library.named_in_code(), vector_random.together(), convolutions.inputs_as_stored():
        yield
