"""Counts of a sorted list are those of the list itself: a sort whose order nobody reads any more goes."""

from __future__ import annotations

import operator

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.passes.base import calls

CASTS = (aten.to.dtype, aten._to_copy.default)
SORTS = (aten.sort.default, aten.sort.stable)


def read_unsorted(gm: fx.GraphModule) -> None:
    """Let counts of sorted values, cast or not, read the values as they were."""
    rewritten = False
    for count in calls(gm, aten.histc.default):
        casts: list[fx.Node] = []
        values = count.args[0]
        while match.is_call(values, *CASTS):
            casts.insert(0, values)
            values = values.args[0]
        if not match.is_call(values, operator.getitem) or values.args[1] != 0:
            continue
        sort = values.args[0]
        if not match.is_call(sort, *SORTS) or any(user.args[1] == 1 for user in sort.users):
            continue
        source = sort.args[0]
        for cast in casts:
            source = rewrite.insert(gm, count, cast.target, (source, *cast.args[1:]), dict(cast.kwargs))
        count.replace_input_with(count.args[0], source)
        rewritten = True
    if rewritten:
        rewrite.finish(gm)
