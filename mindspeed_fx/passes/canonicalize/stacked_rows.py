"""Log-probabilities that are computed row by row and stacked are computed of all rows at once.

``stack([logsumexp(x, -1) for x in logits])`` is ``logsumexp(logits, -1)``, which is how TRL's ``selective_log_softmax``
keeps the memory of one row's at a time; what reads losses finds it in the spelling that it knows, and the fused loss
keeps less memory still. Safe because each row of the result is made of the same row by the same operator.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from mindspeed_fx.graph import match, rewrite
from mindspeed_fx.graph.match import aten
from mindspeed_fx.graph.new_call import NewCall
from mindspeed_fx.passes.base import Context, Miss, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "canonicalize.stacked_rows", "rows at once"

LOSSES = (aten.logsumexp.default, aten.log_softmax.int)
"""One of these has to be among the calls: others are stacked for other reasons."""

BY_ROW = (*LOSSES, aten.gather.default, aten.squeeze.dim, aten.unsqueeze.default, aten.to.dtype, aten.neg.default)


@register(NAME)
def stacked_rows(gm: fx.GraphModule, context: Context) -> PassReport:
    """Log-probabilities stacked row by row become one call."""
    report = PassReport(NAME)
    rewrite_each(report, OPERATOR, calls(gm, aten.stack.default), lambda node: _rewrite(gm, node))
    rewrite.finish(gm)
    return report


def _rewrite(gm: fx.GraphModule, node: fx.Node) -> Outcome:
    rows, region = list(node.args[0]), []
    if match.argument(node, "dim", 0) != 0 or not _is_loss(rows[0]):
        return None
    whole = _lift(node, rows, region)
    if reason := match.unsafe([node, *region], []):
        return reason
    outcome = site(OPERATOR, node, [node, *region])
    if reason := rewrite.substitute(gm, node, rewrite.build(whole)):
        raise Miss(reason)
    return outcome


def _is_loss(n: Any) -> bool:
    while match.is_call(n, *BY_ROW):
        if match.is_call(n, *LOSSES):
            return True
        n = n.args[0]
    return False


def _lift(before: fx.Node, rows: list[Any], region: list[fx.Node]) -> Any:
    """What all rows are rows of, in order; the calls that make them are added to ``region``.

    Raises:
        Miss: they are not made alike.
    """
    source = _source(rows)
    if source is not None:
        return source
    first = rows[0]
    if not match.is_call(first, *BY_ROW) or any(not match.is_call(n, first.target) for n in rows):
        raise Miss(f"the rows of {before.name} are not made alike, of each row of a tensor in order")
    arguments = [_arguments(n) for n in rows]
    lifted = []
    for values in zip(*arguments):
        if isinstance(values[0], fx.Node):
            lifted.append(_lift(before, list(values), region))
        elif all(value == values[0] for value in values):
            lifted.append(values[0])
        else:
            raise Miss(f"the rows of {before.name} are made with different settings")
    region.extend(rows)
    return NewCall(before, first.target, *lifted)


def _arguments(n: fx.Node) -> list[Any]:
    """Arguments of a call on a row as those of the call on all rows: dimensions are counted from the last on."""
    rank = match.rank(n) + (1 if match.is_call(n, aten.squeeze.dim) else 0)
    values = []
    for a in n.target._schema.arguments:
        value = match.argument(n, a.name)
        if a.kwarg_only:
            if value != a.default_value:
                raise Miss(f"{n.name} has {a.name}={value}")
            continue
        if a.name == "dim" and isinstance(value, (list, tuple)):
            value = [d - match.rank(n.args[0]) if d >= 0 else d for d in value]
        elif a.name == "dim" and value >= 0:
            value -= rank
        values.append(value)
    return values


def _source(rows: list[Any]) -> fx.Node | None:
    """x when the rows are x[0], x[1], ... and all of them."""
    sources = {n.args[0] for n in rows if match.is_call(n, aten.select.int) and n.args[1] == 0}
    if len(sources) != 1 or any(not match.is_call(n, aten.select.int) or n.args[1] != 0 for n in rows):
        return None
    (source,) = sources
    places = [n.args[2] for n in rows]
    return source if places == list(range(len(rows))) and match.value(source).shape[0] == len(rows) else None
