"""What a large graph must not pay for after every pass: its code written again."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch.fx as fx

from mindspeed_fx.compat import fx_graph

_STALE = "mindspeed_fx_stale"


@contextlib.contextmanager
def defer_recompile(gm: fx.GraphModule) -> Iterator[None]:
    """Meanwhile :func:`recompile` puts off writing the code of ``gm``, which takes longer than most passes; afterwards
    it is written once, when somebody calls or reads it.
    """
    gm.meta[_STALE] = False
    try:
        yield
    finally:
        if gm.meta.pop(_STALE):
            fx_graph.recompile_when_called(gm)


def recompile(gm: fx.GraphModule) -> None:
    """The code of ``gm`` is written again from its graph: now, or once all passes of a stage are through."""
    if _STALE in gm.meta:
        gm.meta[_STALE] = True
    else:
        gm.recompile()
