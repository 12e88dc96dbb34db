"""Two rotations by the same angles become one launch: queries and keys, forward and backward.

Safe because the values do not change: what the second reads and the first does not make is moved before the first,
where it neither writes nor draws random numbers. On npu alone, where each rotation is a call of its own; generated code
joins them by itself.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
import torch.fx as fx

from mindspeed_fx.graph import rewrite
from mindspeed_fx.graph.edit import is_pure
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.kernels.rope_pair import rope_pair
from mindspeed_fx.passes.base import Context, Outcome, PassReport, calls, register, rewrite_each, site

NAME, OPERATOR = "lowering.rope_pairs", "mindspeed::rope_pair"
rope, backward = torch.ops.mindspeed.rope.default, torch.ops.mindspeed.rope_backward.default


class Rotation(NamedTuple):
    """One call; ``result`` is the node of what it rotated."""

    node: fx.Node
    x: fx.Node
    angles: tuple
    result: fx.Node


@register(NAME)
def rope_pairs(gm: fx.GraphModule, context: Context) -> PassReport:
    """Rotates queries and keys by one launch on npu."""
    report = PassReport(NAME)
    if context.options.target != "npu" or context.options.codegen == "inductor":
        return report.note_reason("on npu alone, and where no code is generated")
    waiting: dict[tuple, Rotation] = {}

    def join(node: fx.Node) -> Outcome:
        rotation = _read(node)
        if rotation is None:
            return None
        first = waiting.pop(rotation.angles, None)
        between = None if first is None else _between(gm, first.node, rotation.x)
        if between is None:
            waiting[rotation.angles] = rotation
            return None
        return _join(gm, first, rotation, between)

    rewrite_each(report, OPERATOR, calls(gm, rope, backward), join)
    if report.rewrites:
        gm.graph.lint()
        recompile(gm)
    return report


def _read(node: fx.Node) -> Rotation | None:
    if node.target is rope:
        x, *angles = node.args
        return Rotation(node, x, (rope, *angles), node)
    grad, x, cos, sin, interleaved, need_angles = node.args
    result = next((u for u in node.users if u.target is operator.getitem and u.args[1] == 0), None)
    alone = not need_angles and all(u is result or not u.users for u in node.users)
    if result is None or not alone or grad.meta["val"].dtype != x.meta["val"].dtype:
        return None
    return Rotation(node, grad, (backward, cos, sin, interleaved), result)


def _between(gm: fx.GraphModule, first: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    """What makes ``x`` after ``first``, in order; None when it reads ``first``, or something between is not pure."""
    nodes = list(gm.graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    if not all(map(is_pure, nodes[place[first] : place[x] + 1])):
        return None
    results, todo = set(), [x]
    while todo:
        node = todo.pop()
        if node is first:
            return None
        if node not in results and place[node] > place[first]:
            results.add(node)
            todo += node.all_input_nodes
    return sorted(results, key=place.__getitem__)


def _join(gm: fx.GraphModule, first: Rotation, second: Rotation, between: list[fx.Node]) -> Outcome:
    kind, cos, sin, interleaved = first.angles
    args = (first.x, second.x, cos, sin, interleaved, kind is backward)
    kernel, reasons = rope_pair.choose("npu", tuple(a.meta["val"] if isinstance(a, fx.Node) else a for a in args), {})
    if kernel is None:
        return "; ".join(reasons)
    for node in between:
        first.node.prepend(node)
    pair = rewrite.insert(gm, first.node, rope_pair.overload, args)
    report = site(OPERATOR, first.node, [first.node, second.node])
    results = [rewrite.insert(gm, first.node, operator.getitem, (pair, i)) for i in (0, 1)]
    for result, rotation in zip(results, (first, second)):
        rotation.result.replace_all_uses_with(result)
        gm.graph.erase_node(rotation.result)
        if rotation.node is not rotation.result:
            for unread in list(rotation.node.users):
                gm.graph.erase_node(unread)
            gm.graph.erase_node(rotation.node)
    return report
