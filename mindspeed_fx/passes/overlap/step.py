"""``overlap.step``: steps of the optimizer write their parameters in place, and those of one bucket of gradients are
one call.

AOTAutograd lets a call that writes its arguments make new tensors, copied back at the end of the graph: two copies of
every weight and moment. Each is made to write where it stands again, behind its gradient and the last node that reads
what it writes, so that a gradient lives no longer than until its step. (Inductor does the same to its graphs by
itself.)
"""

from __future__ import annotations

import operator
import re
from typing import Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import auto_functionalized
from mindspeed_fx.graph.collectives import is_start, is_wait
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.storage import Memories, is_view
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip

NAME = "overlap.step"
STEP = torch.ops.mindspeed.adamw_step.default
WRITTEN = ("weights", "exp_avgs", "exp_avg_sqs", "steps")


@register(NAME)
def overlap_step(gm: fx.GraphModule, context: Context) -> PassReport:
    """Steps of the optimizer in the backward graph write in place."""
    report = PassReport(NAME)
    calls = [n for n in gm.graph.nodes if auto_functionalized.mutable_operator(n) is STEP]
    if not calls:
        return report.note_reason("no optimizer steps in this graph (option optimizer)")
    if context.options.codegen == "inductor":
        return report.note_reason("Inductor lets steps write in place by itself")

    def arguments(node: fx.Node, bases: list[fx.Node]) -> tuple:
        at = {
            name: [bases[i] for i in result]
            for name, result in auto_functionalized.written_positions(node, WRITTEN).items()
        }
        return (*(at[name] for name in WRITTEN), node.kwargs["grads"], node.kwargs["numbers"])

    write_in_place(gm, calls, arguments, report)
    return report


def write_in_place(
    gm: fx.GraphModule,
    calls: Sequence[fx.Node],
    arguments: Callable[[fx.Node, list[fx.Node]], tuple],
    report: PassReport,
) -> None:
    """Calls that AOTAutograd made functional write where they did: each as soon as what it reads is there and nobody
    reads what it writes.

    Args:
        calls: ``auto_functionalized`` nodes.
        arguments: those of the operator itself, from the node and the inputs that it writes.
    """
    memories = Memories(gm.graph).of
    place = {n: k for k, n in enumerate(gm.graph.nodes)}
    readers: dict[int, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "output" or node in calls or node.target is torch.ops.aten.copy_.default:
            continue
        for m in {m for a in node.all_input_nodes for m in memories.get(a, ())}:
            readers[m] = node
    for node in calls:
        writes, bases = auto_functionalized.mutable_operator(node), auto_functionalized.bases_of(node)
        ends = _ends(node, bases or [])
        if bases is None or ends is None:
            report.skipped.append(
                skip(
                    str(writes),
                    node,
                    "what it writes is a part of an input, or is read afterwards; it goes through copies",
                )
            )
            continue
        last = max(
            [*node.all_input_nodes, *(readers[m] for b in bases for m in memories[b] if m in readers)],
            key=place.__getitem__,
        )
        with gm.graph.inserting_after(last):
            new = gm.graph.call_function(writes, arguments(node, bases))
        new.meta = {**{k: v for k, v in node.meta.items() if k != "val"}, "val": None}
        place[new] = place[last] + 0.5
        for end in ends:
            gm.graph.erase_node(end)
        gm.graph.erase_node(node)
        report.rewrites.append(site("in place", new, [new]))
    recompile(gm)


def _ends(node: fx.Node, bases: list[fx.Node]) -> list[fx.Node] | None:
    """The copies back and what they copy, last first; None when something else reads what the call made."""
    results: list[fx.Node] = []
    for item in node.users:
        if item.target is not operator.getitem:
            return None
        for user in item.users:
            if (
                user.target is not torch.ops.aten.copy_.default
                or user.users
                or user.args[0] is not bases[item.args[1] - 1]
            ):
                return None
        results += [item, *item.users]
    return results[::-1]


def join_steps(gm: fx.GraphModule) -> list[fx.Node]:
    """Steps whose gradients come from one bucket become one call, where the last of them stands; returns those
    calls.
    """
    buckets: dict[fx.Node, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.target is STEP and len({_bucket(g) for g in node.args[4]} - {None}) == 1:
            buckets.setdefault(_bucket(node.args[4][0]), []).append(node)
    results = []
    for steps in buckets.values():
        if len(steps) > 1:
            with gm.graph.inserting_after(steps[-1]):
                new = gm.graph.call_function(STEP, tuple(sum((list(s.args[k]) for s in steps), []) for k in range(6)))
            new.meta = dict(steps[-1].meta)
            for s in steps:
                gm.graph.erase_node(s)
            results.append(new)
    return results


def _bucket(grad: fx.Node) -> fx.Node | None:
    """The coalesced collective that a gradient comes from, through views; None without one."""
    while grad.op == "call_function" and not is_start(grad):
        if not (is_wait(grad) or is_view(grad) or grad.target is operator.getitem):
            return None
        grad = grad.args[0]
    return grad if is_start(grad) and re.search("coalesced", str(grad.target)) else None
