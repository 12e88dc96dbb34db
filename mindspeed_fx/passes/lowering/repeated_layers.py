"""Layers that are one graph are given to the code generator once, and called in turn.

What is in a layer was decided before: fused, differentiated, cut and lowered. Inductor makes the code of one layer
(torch's ``invoke_subgraph``) in place of that of all, so that its time and the compiler's no longer grow with their
number. A layer begins where nothing is lost by it (:mod:`mindspeed_fx.partition.repeats`): an addition that is fused
with the norm of the next layer stays fused with it.
"""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.compat import fx_graph, inductor
from mindspeed_fx.graph import op_sets, storage
from mindspeed_fx.partition import repeats
from mindspeed_fx.passes.base import Context, PassReport, register, site

NAME = "lowering.repeated_layers"


@register(NAME)
def repeated_layers(gm: fx.GraphModule, context: Context) -> PassReport:
    """Has code generated once for layers that are the same graph."""
    report = PassReport(NAME)
    if why := _refusal(gm, context):
        return report.note_reason(why)
    found = repeats.repeats(gm.graph)
    if not found:
        return report.note_reason(_why_none(gm))
    for repeat in found:
        first = repeat.layers[0][0]
        share(gm, repeat)
        report.rewrites.append(site(f"{len(repeat.layers)} layers", first, [first]))
    gm.graph.lint()
    gm.recompile()
    return report


def _refusal(gm: fx.GraphModule, context: Context) -> str | None:
    if context.options.codegen != "inductor":
        return "no code is generated"
    if context.options.memory_budget is not None:
        return "under a memory budget each layer is ordered for itself"
    if inductor.writes_cpp_wrapper(context.options.inductor):
        return "Inductor's cpp_wrapper calls no graphs"
    return None


def _why_none(gm: fx.GraphModule) -> str:
    text = f"no {repeats.LEAST_LAYERS} neighbouring stretches of {repeats.LEAST_CALLS} calls or more are alike"
    alone = sorted({op_sets.name(n.target) for n in gm.graph.nodes if n.op == "call_function" and repeats.is_alone(n)})
    return f"{text}; like none are {', '.join(alone)}" if alone else text


def share(gm: fx.GraphModule, repeat: repeats.Repeat) -> None:
    """Each layer becomes a call of one graph, a module of ``gm``; views of what a layer makes stay outside of it."""
    name = fx_graph.unused_attribute(gm, "repeated_layer")
    gm.add_submodule(name, _graph_of(repeat))
    with gm.graph.inserting_before(repeat.layers[0][0]):
        body = gm.graph.get_attr(name)
    first = next(n for n in gm.graph.nodes if n.op != "placeholder" and not inductor.is_seed(n))
    for seed in filter(inductor.is_seed, list(gm.graph.nodes)):
        first.prepend(seed)
    results: dict[fx.Node, fx.Node] = {}
    for calls, inputs in zip(repeat.layers, repeat.inputs):
        made = [calls[i] for i in repeat.outputs]
        inside = {n for n in calls if not storage.is_view(n)}
        with gm.graph.inserting_before(calls[0]):
            items = inductor.call_subgraph(gm.graph, body, [results.get(n, n) for n in inputs], made)
        results.update(zip(made, items))
        for node in made:
            node.replace_all_uses_with(results[node], delete_user_cb=lambda user: user not in inside)
        for node in reversed(calls):
            if not node.users:
                gm.graph.erase_node(node)


def _graph_of(repeat: repeats.Repeat) -> fx.GraphModule:
    """The first layer as a graph of its own."""
    graph, copies = fx.Graph(), {}
    for i, source in enumerate(repeat.inputs[0]):
        copies[source] = graph.placeholder(f"input_{i}")
        copies[source].meta["val"] = source.meta["val"]
    for node in repeat.layers[0]:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    output = graph.output(tuple(copies[repeat.layers[0][i]] for i in repeat.outputs))
    inductor.keep_layouts(output)
    return fx.GraphModule({}, graph)
