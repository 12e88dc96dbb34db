"""The part of :mod:`mindspeed_fx.compat` about the inputs of Dynamo's graphs."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing


def with_inputs(gm: fx.GraphModule, added: Sequence[torch.Tensor], stem: str) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of Dynamo's graph with inputs for ``added`` behind its own, named after ``stem``, and what to trace them
    with: sizes that do not change. (Dynamo goes on using its own graph after the backend is done.)"""
    graph, memo, last = fx.Graph(), {}, None
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            memo[node] = last = graph.node_copy(node)
            if hasattr(node, "_dynamo_source"):
                last._dynamo_source = node._dynamo_source
    mode = tracing.fake_mode_of([n.meta.get("example_value") for n in memo])
    fakes = [t if mode is None else mode.from_tensor(t, static_shapes=True) for t in added]
    for k, fake in enumerate(fakes):
        new = graph.placeholder(f"{stem}_{k}")
        new.meta = {"val": fake, "example_value": fake}
        new._dynamo_source = None  # AOTAutograd asks every input
    graph.output(graph.graph_copy(gm.graph, memo))
    copy = fx.GraphModule(gm, graph)
    copy.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copy._param_name_to_source = gm._param_name_to_source
    return copy, fakes
