"""The pass ``sharding.regather``: collectives that the backward recomputes instead of keeping their results.

torch's partitioner keeps the result of every collective, whatever is decided about the rest. A plan may want otherwise:

* ``gather: zero3``: parameters that were made whole for the forward are made whole again for the backward
* ``recompute: full``: the collectives of a layer are recomputed with everything else of it
* ``recompute: norm+activation_function``, or another word: activations that were gathered for a layer are gathered
  again, from the part at hand

Without a plan, option "regather" asks for the last of these, as Megatron's sequence parallelism has it.

They are marked in the joint graph as ``torch.utils.checkpoint`` marks its regions, which the partitioner and every
planner here honor. The graph is the same on every rank, and so is what is marked.
"""

from __future__ import annotations

import re

import torch
import torch.fx as fx

from mindspeed_fx.compat import partitioner
from mindspeed_fx.graph.collectives import is_start, is_wait
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.storage import is_view
from mindspeed_fx.passes.base import Context, PassReport, register, site
from mindspeed_fx.passes.sharding.gathered_inputs import mark_gathered_inputs
from mindspeed_fx.passes.sharding.recognize import kind_of
from mindspeed_fx.passes.sharding.verify import forward_of

aten = torch.ops.aten

NAME = "sharding.regather"
REPEATABLE = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@register(NAME)
def regather(gm: fx.GraphModule, context: Context) -> PassReport:
    """Marks collectives of the forward that a plan wants recomputed: zero3's, and those of recomputed layers."""
    report, result = PassReport(NAME), context.sharding
    if result is None or result.program is None:
        if context.options.regather:
            mark_gathered_inputs(gm, report)
            return report
        return report.note_reason("the model is not parallelized (mindspeed_fx.parallelize)")
    plan, mesh = result.plan, result.sharding.mesh
    whole = {mesh.get_group(d).group_name for d, stage in plan.gather.items() if stage == "zero3"}
    forward = forward_of(gm)
    nodes = [n for n in gm.graph.nodes if n in forward]
    of_parameters = _of_one_input(nodes)
    marked = _gathered_parameters(of_parameters, whole)
    if plan.recompute == context.options.recompute and plan.recompute is not None:
        for n in nodes:
            if n not in of_parameters and _repeatable(n):
                marked |= _in_layer(n, forward, plan.recompute)
    for n in marked:
        if not partitioner.must_recompute(n):
            partitioner.mark_recompute(n)
    report.rewrites = [site(kind_of(n)[0], n) for n in nodes if n in marked and kind_of(n) is not None]
    return report


def _of_one_input(nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Nodes that are computed from a single input of the graph, a parameter's whole for instance -> that input."""
    results: dict[fx.Node, fx.Node] = {}
    for n in nodes:
        sources = {n} if n.op == "placeholder" else {results.get(a) for a in n.all_input_nodes}
        if len(sources) == 1 and (source := sources.pop()) is not None:
            results[n] = source
    return results


def _gathered_parameters(of_parameters: dict[fx.Node, fx.Node], groups: set[str]) -> set[fx.Node]:
    """What is made of single inputs by gathers over ``groups``, and everything made of that alone."""
    results: set[fx.Node] = set()
    for n in of_parameters:
        kind = kind_of(n)
        if (
            kind is not None
            and kind[0] == "all_gather"
            and kind[1] in groups
            or any(a in results for a in n.all_input_nodes)
        ):
            results.add(n)
    return results


def _repeatable(n: fx.Node) -> bool:
    """A collective whose sizes are known."""
    kind = kind_of(n)
    return kind is not None and kind[0] in REPEATABLE and is_start(n) and len(n.all_input_nodes) == 1


def _in_layer(start: fx.Node, forward: set[fx.Node], word: str) -> set[fx.Node]:
    """The collective with what waits for it and, for a gather, what puts its result in order; empty where another layer
    reads it, or ``word`` does not make it again."""
    gather = kind_of(start)[0] == "all_gather"
    layer = _layer(start)
    if layer is None or not (word == "full" or gather and word != "none" and not word.startswith("block:")):
        return set()
    results, todo = {start}, [start]
    while todo:
        for user in todo.pop().users:
            if user not in forward or user in results:
                continue
            if _layer(user) != layer:
                return set()
            if is_wait(user) or gather and _lays_out(user):
                results.add(user)
                todo.append(user)
    return results


def _layer(n: fx.Node) -> str | None:
    """The numbered layer of a node, as policy "full" knows layers."""
    match = re.match(r"(?:.*?(?:^|\.))??\d+(?=\.|$)", module_path(n))
    return match[0] if match else None


def _lays_out(n: fx.Node) -> bool:
    """Whether a call puts elements in another order, or takes some, and computes nothing."""
    return is_view(n) or n.target in (aten.cat.default, aten.clone.default)
