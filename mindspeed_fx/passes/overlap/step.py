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
    can, before, erased = _writable(calls), {}, []
    for node in calls:
        writes, bases = auto_functionalized.mutable_operator(node), _written_inputs(node)
        if bases is None or node not in can:
            report.skipped.append(
                skip(
                    str(writes),
                    node,
                    "what it writes is a part of an input, or is read afterwards; it goes through copies",
                )
            )
            continue
        earlier = [before[b] for b in bases if b in before]
        last = max(
            [*node.all_input_nodes, *earlier, *(readers[m] for b in bases for m in memories[b] if m in readers)],
            key=place.__getitem__,
        )
        with gm.graph.inserting_after(last):
            new = gm.graph.call_function(writes, arguments(node, bases))
        new.meta = {**{k: v for k, v in node.meta.items() if k != "val"}, "val": None}
        place[new] = place[last] + 0.5
        before |= dict.fromkeys(bases, new)
        for item in node.users:
            copies = [user for user in item.users if user.target is torch.ops.aten.copy_.default]
            erased += [item, *copies]
        erased.append(node)
        report.rewrites.append(site("in place", new, [new]))
    _erase(gm.graph, erased)
    recompile(gm)


def _erase(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Users first."""
    for node in sorted(nodes, key={n: k for k, n in enumerate(graph.nodes)}.__getitem__, reverse=True):
        graph.erase_node(node)


def _written_inputs(node: fx.Node) -> list[fx.Node] | None:
    """What a call writes, through calls before it that write the same: a weight's gradient comes in several parts."""
    bases = auto_functionalized.bases_of(node)
    if bases is None:
        return None
    inputs = []
    for base in bases:
        call = base.args[0] if base.target is operator.getitem else None
        if isinstance(call, fx.Node) and auto_functionalized.mutable_operator(call) is not None:
            earlier = _written_inputs(call)
            if earlier is None:
                return None
            base = earlier[base.args[1] - 1]
        inputs.append(base)
    return inputs


def _writable(calls: Sequence[fx.Node]) -> set[fx.Node]:
    """The calls whose results are copied back to what they write, or written further by such a call, and read by
    nothing else.
    """
    can: set[fx.Node] = set()
    for node in reversed(calls):
        bases = _written_inputs(node)
        if bases is not None and all(_is_copied_back(item, bases, can) for item in node.users):
            can.add(node)
    return can


def _is_copied_back(item: fx.Node, bases: list[fx.Node], can: set[fx.Node]) -> bool:
    if item.target is not operator.getitem:
        return False
    for user in item.users:
        copied = user.target is torch.ops.aten.copy_.default and not user.users
        is_written_on = user in can and item in (auto_functionalized.bases_of(user) or ())
        if not (copied and user.args[0] is bases[item.args[1] - 1] or is_written_on):
            return False
    return True


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
