"""Regions that the caller marked (``torch.compiler.nested_compile_region``) are taken for what they call.

The mark has done its work when the graph comes here: Dynamo has read one region for all that are alike. From here on
the graph is as it is without the mark, so that everything is fused across the regions' edges too, and layers that are
alike are shared where that costs nothing (:mod:`mindspeed_fx.partition.shorten`).
"""

from __future__ import annotations

import itertools

import torch
import torch.fx as fx

from mindspeed_fx.compat.graph_inputs import copy_dynamo_graph, source_name
from mindspeed_fx.graph.provenance import module_path, spelled


def inline_regions(gm: fx.GraphModule) -> None:
    """The calls of regions in a copy of Dynamo's graph -> what they call, in place. Regions with options of their own
    stay."""
    for body in [m for m in gm.children() if isinstance(m, fx.GraphModule)]:
        inline_regions(body)  # of checkpoints and other regions
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        region = call.args[0]
        body = getattr(gm, region.target)
        if body.meta.get("nested_region_config") is not None:
            continue
        _inline(gm, call, body)
        if not region.users:
            gm.graph.erase_node(region)
        if all(n.target != region.target for n in gm.graph.find_nodes(op="get_attr")):
            delattr(gm, region.target)


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    _, _, *inputs = call.args
    made: dict[fx.Node, fx.Node] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    moved = _moved(made)
    with gm.graph.inserting_before(call):
        results = gm.graph.graph_copy(body.graph, made)
    for old, new in made.items():
        if old.op == "get_attr":  # a graph that the region calls: passes change it in place, for one caller
            new.target = f"{call.name}_{old.target}"
            own = getattr(body, old.target)
            setattr(gm, new.target, copy_dynamo_graph(own) if isinstance(own, fx.GraphModule) else own)
        if old.op != "placeholder" and moved and new.meta.get("nn_module_stack"):
            stack = new.meta["nn_module_stack"].items()
            new.meta["nn_module_stack"] = {k: (_renamed(path, moved), kind) for k, (path, kind) in stack}
    for item in list(call.users):
        item.replace_all_uses_with(results[item.args[1]])
        gm.graph.erase_node(item)
    gm.graph.erase_node(call)


def _moved(inputs: dict[fx.Node, fx.Node]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Of the inputs of a region that was read for another layer: this layer for that one, each a path of names. Weights
    tell, by their place in the model."""
    moved: dict[tuple[str, ...], tuple[str, ...]] = {}
    for old, new in inputs.items():
        if new.op != "placeholder":  # made by the layer before
            continue
        names, others = module_path(old).split("."), (spelled(source_name(new)) or module_path(new)).split(".")
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(names, others))))
        if same < min(len(names), len(others)) and names[same].isdigit() and others[same].isdigit():
            moved.setdefault(tuple(names[: same + 1]), tuple(others[: same + 1]))
    return moved


def _renamed(path: str, moved: dict[tuple[str, ...], tuple[str, ...]]) -> str:
    names = tuple(spelled(path).split("."))
    layer = next((old for old in sorted(moved, key=len, reverse=True) if names[: len(old)] == old), ())
    return ".".join((*moved.get(layer, ()), *names[len(layer) :]))
