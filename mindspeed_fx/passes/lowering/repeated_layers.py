"""Layers that are one graph are given to the code generator once, and called in turn.

What is in a layer was decided before: fused, differentiated, cut and lowered. Inductor makes the code of one layer
(torch's ``invoke_subgraph``) in place of that of all, so that its time and the compiler's no longer grow with their
number. A layer begins where nothing is lost by it (:mod:`mindspeed_fx.partition.repeats`): an addition that is fused
with the norm of the next layer stays fused with it. Where layers send, such graphs lie between two collectives: what
comes behind one is shared as far as it is alike. Turned off, each layer is traced for itself too
(:mod:`mindspeed_fx.partition.shorten`).
"""

from __future__ import annotations

import torch
import torch.fx as fx

from mindspeed_fx.compat import called_graphs, fx_graph, inductor
from mindspeed_fx.graph import op_sets, storage
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.partition import repeats
from mindspeed_fx.passes.base import Context, PassReport, register, site

NAME = "lowering.repeated_layers"


@register(NAME)
def repeated_layers(gm: fx.GraphModule, context: Context) -> PassReport:
    """Has code generated once for layers that are the same graph."""
    report = PassReport(NAME)
    if why := _refusal(gm, context):
        return report.note_reason(why)
    layers = repeats.repeats(gm.graph)
    if not layers:
        return report.note_reason(_why_none(gm))
    _move_up(gm.graph)
    results: dict[fx.Node, fx.Node] = {}
    for repeat in layers:
        first = repeat.layers[0][0]
        report.layers.append(tuple(tuple(n.name for n in calls if not storage.is_view(n)) for calls in repeat.layers))
        share(gm, repeat, results)
        report.rewrites.append(site(f"{len(repeat.layers)} layers", first, [first]))
    gm.graph.lint()
    recompile(gm)
    return report


def _refusal(gm: fx.GraphModule, context: Context) -> str | None:
    if context.options.codegen != "inductor":
        return "no code is generated"
    if any(isinstance(n.meta["val"], torch.SymInt) for n in gm.graph.nodes if n.op == "placeholder"):
        return "sizes are known when it runs alone"
    if context.options.memory_budget is not None:
        return "under a memory budget each layer is ordered for itself"
    if inductor.writes_cpp_wrapper(context.options.inductor):
        return "Inductor's cpp_wrapper calls no graphs"
    return None


def _why_none(gm: fx.GraphModule) -> str:
    text = f"no {repeats.LEAST_LAYERS} neighbouring stretches of {repeats.LEAST_CALLS} calls or more are alike"
    alone = sorted({op_sets.name(n.target) for n in gm.graph.nodes if n.op == "call_function" and repeats.is_alone(n)})
    return f"{text}; like none are {', '.join(alone)}" if alone else text


def _move_up(graph: fx.Graph) -> None:
    """Constants and seeds stand before all layers, so that a layer's calls have none between them."""
    raised = [n for n in graph.nodes if n.op == "get_attr" or repeats.is_made_before(n)]
    first = next(n for n in graph.nodes if n.op != "placeholder" and n not in set(raised))
    for node in raised:
        first.prepend(node)


def share(gm: fx.GraphModule, repeat: repeats.Repeat, results: dict[fx.Node, fx.Node]) -> None:
    """Each layer becomes a call of one graph, a module of ``gm``; views of what a layer makes stay outside of it.

    Args:
        results: calls of the graph that are gone, and what is read in their place; these are added.
    """
    name = fx_graph.unused_attribute(gm, "repeated_layer")
    gm.add_submodule(name, _graph_of(repeat, results))
    with gm.graph.inserting_before(repeat.layers[0][0]):
        body = gm.graph.get_attr(name)
    for calls, inputs in zip(repeat.layers, repeat.inputs):
        values = [calls[i] for i in repeat.outputs]
        inside = {n for n in calls if not storage.is_view(n)}
        with gm.graph.inserting_before(calls[0]):
            items = called_graphs.call_subgraph(gm.graph, body, [results.get(n, n) for n in inputs], values)
        results.update(zip(values, items))
        for node in values:
            node.replace_all_uses_with(results[node], delete_user_cb=lambda user: user not in inside)
        for node in reversed(calls):
            if not node.users:
                gm.graph.erase_node(node)


def _graph_of(repeat: repeats.Repeat, results: dict[fx.Node, fx.Node]) -> fx.GraphModule:
    """A layer as a graph of its own. What the first layer reads at two places others may read apart, so that an input
    is told by what it is in every layer.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs: dict[tuple[fx.Node, ...], fx.Node] = {}
    for i, sources in enumerate(zip(*([results.get(n, n) for n in nodes] for nodes in repeat.inputs))):
        inputs[sources] = graph.placeholder(f"input_{i}")
        inputs[sources].meta["val"] = sources[0].meta["val"]
    for calls in zip(*repeat.layers):
        reads = zip(*map(repeats.arguments, calls))
        following = iter([copies[read[0]] if read[0] in copies else inputs[read] for read in reads])
        copies[calls[0]] = graph.node_copy(calls[0], lambda _, following=following: next(following))
    called_graphs.keep_layouts(graph.output(tuple(copies[repeat.layers[0][i]] for i in repeat.outputs)))
    return fx.GraphModule({}, graph)
