"""What a large graph must not pay for after every pass: its code written again."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Iterator

import torch.fx as fx

from mindspeed_fx.compat import fx_graph

_STALE, _LEFT = "mindspeed_fx_stale", "mindspeed_fx_left"


@contextlib.contextmanager
def defer_recompile(gm: fx.GraphModule) -> Iterator[None]:
    """Meanwhile :func:`recompile` puts off writing the code of ``gm``, which takes longer than most passes; afterwards
    it is written once, when somebody calls or reads it.
    """
    gm.meta[_STALE] = False
    try:
        yield
    finally:
        gm.meta.pop(_LEFT, None)
        if gm.meta.pop(_STALE):
            fx_graph.recompile_when_called(gm)


def recompile(gm: fx.GraphModule) -> None:
    """The code of ``gm`` is written again from its graph: now, or once all passes of a stage are through."""
    if _STALE in gm.meta:
        gm.meta[_STALE] = True
    else:
        gm.recompile()


def is_unchanged(gm: fx.GraphModule) -> bool:
    """Whether ``gm`` is as :func:`leave` saw it, within :func:`defer_recompile`: its nodes, what they call and read,
    and their fake values. Of what nobody touched these are the very same objects, so that it is known at once.
    """
    if _LEFT not in gm.meta:
        return False
    (calls, values), (calls_now, values_now) = gm.meta[_LEFT], _contents(gm)
    return calls == calls_now and all(map(operator.is_, values, values_now))


def leave(gm: fx.GraphModule) -> None:
    """Note what ``gm`` looks like now, for the next pass to ask :func:`is_unchanged`."""
    if _STALE in gm.meta:
        gm.meta[_LEFT] = _contents(gm)


def _contents(gm: fx.GraphModule) -> tuple[list[tuple], list[Any]]:
    nodes = list(gm.graph.nodes)
    return [(n, n.target, n.args, n.kwargs) for n in nodes], [n.meta.get("val") for n in nodes]
