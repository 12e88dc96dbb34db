"""Regions, marked by the caller (``torch.compiler.nested_compile_region``) or by us
(:mod:`mindspeed_fx.compat.alike_layers`), are taken for what they call.

The mark has done its work when the graph comes here: Dynamo has read one region for all that are alike. From here on
the graph is as it is without the mark, so that everything is fused across the regions' edges too, and layers that are
alike are shared where that costs nothing (:mod:`mindspeed_fx.partition.shorten`).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from mindspeed_fx.compat.called_graphs import has_options
from mindspeed_fx.compat.graph_inputs import copy_dynamo_graph, source_name
from mindspeed_fx.graph.edit import stand_in
from mindspeed_fx.graph.provenance import module_path, spelled

Path = tuple[str, ...]


def inline_regions(gm: fx.GraphModule) -> str:
    """The calls of regions in a copy of Dynamo's graph -> what they call, in place. Regions with options of their own
    stay.

    Returns:
        How many there were; empty for none.
    """
    bodies = []
    for body in [m for m in gm.children() if isinstance(m, fx.GraphModule)]:
        inline_regions(body)  # of checkpoints and other regions
    for call in gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph):
        region = call.args[0]
        body = getattr(gm, region.target)
        if has_options(body) or any(user.target is not operator.getitem for user in call.users):
            continue
        _inline(gm, call, body)
        bodies.append(body)
        if not region.users:
            gm.graph.erase_node(region)
        if not gm.graph.find_nodes(op="get_attr", target=region.target):
            delattr(gm, region.target)
    return f"{len(bodies)} calls of {len(set(bodies))} that Dynamo read" if bodies else ""


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule) -> None:
    _, _, *inputs = call.args
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    moved = _moved(copies)
    with gm.graph.inserting_before(call):
        results = gm.graph.graph_copy(body.graph, copies)
    for old, new in copies.items():
        if old.op == "placeholder":
            continue
        if old.op == "get_attr":  # a graph that the region calls: passes change it in place, for one caller
            new.target = f"{call.name}_{old.target}"
            own = getattr(body, old.target)
            setattr(gm, new.target, copy_dynamo_graph(own) if isinstance(own, fx.GraphModule) else own)
        if moved and (stack := new.meta.get("nn_module_stack")):
            new.meta["nn_module_stack"] = {k: (_renamed(path, moved), kind) for k, (path, kind) in stack.items()}
    stand_in(call, results)


def _moved(inputs: dict[fx.Node, Any]) -> dict[Path, Path]:
    """Of the inputs of a region that was read for one layer and is called for another: where the modules of that one
    are -> where those of the other are. Weights tell, by their place in the model."""
    moved: dict[Path, Path] = {}
    for old, new in inputs.items():
        if not isinstance(new, fx.Node) or new.op != "placeholder":  # a number, or made by the layer before
            continue
        names, others = (
            tuple(path.split(".")) for path in (module_path(old), spelled(source_name(new)) or module_path(new))
        )
        differ = [i for i, pair in enumerate(zip(names, others)) if pair[0] != pair[1]]
        if differ and all(names[i].isdigit() and others[i].isdigit() for i in differ):
            moved.setdefault(names[: differ[-1] + 1], others[: differ[-1] + 1])
    return moved


def _renamed(path: str, moved: dict[Path, Path]) -> str:
    names = tuple(spelled(path).split("."))
    for old, new in moved.items():
        if (n := min(len(old), len(names))) and names[:n] == old[:n]:
            return ".".join((*new[:n], *names[n:]))
    return ".".join(names)
