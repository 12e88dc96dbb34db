"""The part of :mod:`mindspeed_fx.compat` about copies of Dynamo's graphs, and their inputs."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import tracing
from mindspeed_fx.compat.fx_graph import lazy_graph


def copy_dynamo_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of Dynamo's graph and of the graphs of its higher-order operators, with all that Dynamo says of them;
    tensors and modules are shared. What the backend changes is then not seen by those who keep the graph: Dynamo, and
    backends that call this one.
    """
    graph, memo, empty = fx.Graph(), {}, fx.Graph()
    graph.output(graph.graph_copy(gm.graph, memo))
    for node in memo.values():
        node.meta = dict(node.meta)
    for node in gm.graph.nodes:
        if hasattr(node, "_dynamo_source"):
            memo[node]._dynamo_source = node._dynamo_source
    copy = lazy_graph(torch.nn.Module(), empty)
    for name in ("_parameters", "_buffers", "_modules"):  # as they are: a plain tensor is no buffer
        getattr(copy, name).update(getattr(gm, name))
    for name, body in copy._modules.items():
        if isinstance(body, fx.GraphModule):
            copy._modules[name] = copy_dynamo_graph(body)
    for key, value in vars(gm).items():
        copy.__dict__.setdefault(key, value)
    copy.training, copy.meta, copy.graph = gm.training, dict(gm.meta), graph
    empty._owning_module = None
    return copy


def source_name(node: fx.Node) -> str:
    """Where Dynamo takes an input of its graph from, as Python would read it; empty where it does not say."""
    return getattr(getattr(node, "_dynamo_source", None), "name", "")


def drop_owner(gm: fx.GraphModule) -> None:
    """End the circle of a module and its graph once it is compiled: the tensors that the module holds, the states of an
    optimizer among them, go when their owner lets them go, not with the next collection of garbage."""
    gm.graph._owning_module = None


def device_of(example_inputs: Sequence[Any]) -> str:
    """Target of a graph: the device type of its inputs, "npu" for torch_npu's; "cpu" without tensors."""
    types = {t.device.type for t in example_inputs if isinstance(t, torch.Tensor)} - {"cpu", "meta"}
    device = sorted(types)[0] if types else "cpu"
    return "npu" if device == "privateuseone" else device


def add_inputs(gm: fx.GraphModule, added: Sequence[torch.Tensor], stem: str) -> list[Any]:
    """Give a copy of Dynamo's graph inputs for ``added`` behind its own, named after ``stem``, in place; returns what
    to trace them with: sizes that do not change.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    fakes = of_fixed_sizes(gm, added)
    with gm.graph.inserting_after(inputs[-1]):
        for k, fake in reversed(list(enumerate(fakes))):
            new = gm.graph.placeholder(f"{stem}_{k}")
            new.meta = {"val": fake, "example_value": fake}
            new._dynamo_source = None  # AOTAutograd asks every input
    gm.recompile()
    return fakes


def of_fixed_sizes(gm: fx.GraphModule, tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """What to trace inputs of Dynamo's graph with that Dynamo has not seen, such as a rank's parts of parameters: no
    size of them is a symbol, as AOTAutograd would make it of a tensor without a context. Fake tensors stay as they are.
    """
    mode = tracing.fake_mode_of([n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")])
    detached = [t if t is None else t.detach() for t in tensors]
    if mode is None:
        return detached
    return [t if t is None or tracing.is_fake(t) else mode.from_tensor(t, static_shapes=True) for t in detached]


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


def as_plain(value: Any) -> Any:
    """A tensor of a subclass that changes no operator as a plain one. AOTAutograd watches operators in a graph's first
    run (for outputs of custom ones that alias inputs), and its watch refuses every class but a few.
    """
    if not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter):
        return value
    is_plain = type(value).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    return value.as_subclass(torch.Tensor) if is_plain else value
