"""The part of :mod:`mindspeed_fx.compat` about the inputs of Dynamo's graphs."""

from __future__ import annotations

from typing import Any, Callable, Sequence

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


def read_through(
    gm: fx.GraphModule, inputs: dict[int, tuple], function: Callable, exempt: Callable[[fx.Node], bool] | None = None
) -> None:
    """Put ``function(input, *arguments)`` between inputs of Dynamo's graph and their users, in place.

    Args:
        inputs: position of an input -> further arguments.
        exempt: users that go on reading the input itself; none by default.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(placeholders[-1]):
        for i, arguments in inputs.items():
            users = [n for n in placeholders[i].users if exempt is None or not exempt(n)]
            if not users:
                continue
            read = gm.graph.call_function(function, (placeholders[i], *arguments))
            values = ("val", "example_value", "tensor_meta")
            read.meta = {key: value for key, value in placeholders[i].meta.items() if key in values}
            for user in users:
                user.replace_input_with(placeholders[i], read)
    gm.recompile()


def with_state(compiled: Callable, positions: Sequence[int], state: Callable[[list[Any]], Sequence[Any]]) -> Callable:
    """``compiled``, which takes ``state`` of the inputs at ``positions`` behind its inputs, as a function of those."""

    def run(*args: Any) -> Any:
        return compiled(*args, *state([args[i] for i in positions]))

    return run
