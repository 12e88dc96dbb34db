"""Dynamo's graph of a model of many layers that are alike -> the graph of one with :data:`KEPT` of them, to be unrolled
(:mod:`mindspeed_fx.partition.unroll`) when the calls of a layer are what is compiled.

All that comes before code is made then takes the time of five layers. That all middle layers end as the same calls is
not assumed: unrolling looks at the two in the middle, and where it finds a difference, or a reader of one layer alone,
the whole graph is compiled as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Hashable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import fake
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.graph.writes import written_by
from mindspeed_fx.partition import repeats
from mindspeed_fx.partition.stretch import LayersDiffer, Source, Stretch, source, stretches

KEPT = 5
"""Layers: two before and three behind those that are left out, of which the last differs in many a backward."""
BEFORE = KEPT // 2
LEAST_LEFT_OUT = 2
"""Layers: leaving out fewer saves less than looking for them costs."""
LEAST_CALLS = repeats.LEAST_CALLS // 2
"""Of a layer: of fewer, two or three operators each, no code is shared."""


@dataclass(frozen=True)
class Shortened:
    """What a graph lacks. It holds no inputs: it lives as long as the backward is not compiled."""

    left_out: int
    kept: tuple[int, ...]
    """Of each input of the short graph its position in the whole one."""
    inputs: int
    """How many the whole graph has."""
    own: dict[int, tuple[int, Hashable]]
    """Position in the whole graph of an input that each layer has for itself -> (layer, its name in every layer)."""

    @property
    def identity(self) -> str:
        """What compile caches must know besides the short graph."""
        return f"-{self.left_out} more layers of {self.inputs} inputs: {sorted(self.own.items())}"


def shorten(gm: fx.GraphModule, inputs: Sequence[Any]) -> Shortened:
    """Leave the middle layers out of ``gm``, in place.

    Args:
        gm: a copy of Dynamo's graph.
        inputs: its inputs.

    Raises:
        LayersDiffer: there are too few layers, or they are not alike; says why. Then the graph stays as it is.
    """
    if any(fake.has_symbols(x) or isinstance(x, torch.SymInt) for x in inputs):
        raise LayersDiffer("sizes are symbols")
    if any(n.op == "call_module" or n.target is torch.ops.higher_order.invoke_subgraph for n in gm.graph.nodes):
        raise LayersDiffer("the graph calls modules, or regions that are compiled apart")
    reasons = [f"fewer than {KEPT + LEAST_LEFT_OUT} neighbouring layers are alike"]
    calls = [n for n in gm.graph.nodes if n.op in ("call_function", "call_method")]
    for _, _, stretch in stretches(calls, least=1):  # a checkpointed layer is one call
        if len(stretch.layers) >= KEPT + LEAST_LEFT_OUT:
            if (size := sum(map(_calls, stretch.layers[0]))) < LEAST_CALLS:
                reasons.append(f"a layer is {size} calls, fewer than {LEAST_CALLS}")
                continue
            try:
                return _without_middle(gm, stretch, inputs)
            except LayersDiffer as why:
                reasons.append(str(why))
    raise LayersDiffer(reasons[-1])


def _without_middle(gm: fx.GraphModule, stretch: Stretch, inputs: Sequence[Any]) -> Shortened:
    position = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    own = _own_inputs(stretch, position, inputs)
    if not own:
        raise LayersDiffer("layers have no inputs of their own")
    _check_readers(stretch, own)
    kept = tuple(i for n, i in position.items() if own.get(n, (0, ""))[0] not in _middle(stretch))
    _leave_out(gm.graph, stretch, own)
    recompile(gm)
    return Shortened(len(_middle(stretch)), kept, len(inputs), {position[n]: where for n, where in own.items()})


def _calls(node: fx.Node) -> int:
    """How many calls a call is, with those of the graphs that it calls."""
    bodies = [getattr(node.graph.owning_module, a.target) for a in node.all_input_nodes if a.op == "get_attr"]
    inner = [n for body in bodies if isinstance(body, fx.GraphModule) for n in body.graph.nodes]
    return 1 + sum(_calls(n) for n in inner if n.op.startswith("call"))


def _middle(stretch: Stretch) -> range:
    return range(BEFORE, len(stretch.layers) - (KEPT - BEFORE))


def _own_inputs(
    stretch: Stretch, position: dict[fx.Node, int], inputs: Sequence[Any]
) -> dict[fx.Node, tuple[int, Hashable]]:
    """The inputs that each layer has for itself, with the layer and a name; all else that a layer reads is the same in
    all, or made by the layer before it."""
    own: dict[fx.Node, tuple[int, Hashable]] = {}
    for name, nodes in stretch.reads():
        if all(n is nodes[0] for n in nodes):
            if nodes[0] in stretch.place:
                raise LayersDiffer(f"all layers read {nodes[0].name} of one")
        elif all(n.op == "get_attr" for n in nodes):
            if len({_description(n.graph.owning_module, n.target) for n in nodes}) > 1:
                raise LayersDiffer(f"{nodes[0].target} and {nodes[1].target} of two layers are not alike")
        elif all(n in position for n in nodes):
            if len({_kind(inputs[position[n]]) for n in nodes}) > 1 or len(set(nodes)) < len(nodes):
                raise LayersDiffer(f"the inputs {nodes[0].name} and {nodes[1].name} of two layers are not alike")
            for i, n in enumerate(nodes):
                if own.setdefault(n, (i, name))[0] != i:
                    raise LayersDiffer(f"two layers read {n.name}")
                if any(_writes(user) for user in n.users):
                    raise LayersDiffer(f"a layer writes {n.name}")
            if len({own[n][1] for n in nodes}) > 1:
                raise LayersDiffer("a layer reads at two places what others have two inputs for")
        elif nodes[1] not in stretch.place or source(nodes, lambda n: _made(stretch, n)) != _before(stretch, nodes[1]):
            raise LayersDiffer(f"{nodes[1].name} is not of the layer before")
    return own


def _description(owner: torch.nn.Module, name: str) -> Hashable:
    """Equal for graphs that higher-order operators call and that are the same; of all else, which it is."""
    body = getattr(owner, name)
    if not isinstance(body, fx.GraphModule):
        return id(body)
    number = {n: i for i, n in enumerate(body.graph.nodes)}
    rows = []
    for n in body.graph.nodes:
        target = _description(body, n.target) if n.op == "get_attr" else "" if n.op == "placeholder" else n.target
        rows.append((n.op, target, str(fx.map_arg((n.args, n.kwargs), lambda a: f"%{number[a]}")), repeats.value(n)))
    return tuple(rows)


def _writes(call: fx.Node) -> bool:
    """Whether it is plain that a call writes, or its backward does; what is not is found when the graph is traced."""
    return bool(written_by(call)) or "main_grad" in getattr(call.target, "__name__", "")


def _made(stretch: Stretch, node: fx.Node) -> tuple[Hashable, int, int] | None:
    if node not in stretch.place:
        return None
    layer, call = stretch.place[node]
    return call, layer, len(stretch.layers)


def _before(stretch: Stretch, node: fx.Node) -> Source:
    return Source(stretch.place[node][1], 1, -1)


def _kind(value: Any) -> Any:
    """What compiled code knows of an input."""
    if not isinstance(value, torch.Tensor):
        return type(value), value
    if torch.utils._python_dispatch.is_traceable_wrapper_subclass(value):
        raise LayersDiffer("inputs are tensors of other classes")
    static = getattr(value, "_dynamo_static_input_type", None)
    layout = *repeats.layout(value), value.device, value.layout
    return *layout, value.requires_grad, value.is_leaf, isinstance(value, torch.nn.Parameter), static


def _check_readers(stretch: Stretch, own: dict[fx.Node, tuple[int, Hashable]]) -> None:
    """Nothing but the next layer reads what a layer that is left out makes."""
    for i in _middle(stretch):
        for node in stretch.layers[i]:
            if any(stretch.place.get(user, (-1, 0))[0] not in (i, i + 1) for user in node.users):
                raise LayersDiffer(f"{node.name} of a layer is read outside of the next")
    for node, (i, _) in own.items():
        if any(stretch.place.get(user, (-1, 0))[0] != i for user in node.users):
            raise LayersDiffer(f"{node.name} of a layer is read outside of it")


def _leave_out(graph: fx.Graph, stretch: Stretch, own: dict[fx.Node, tuple[int, Hashable]]) -> None:
    middle = _middle(stretch)
    last = stretch.layers[middle.stop - 1]
    for node, standing_in in zip(last, stretch.layers[middle.start - 1]):
        node.replace_all_uses_with(
            standing_in, delete_user_cb=lambda user: stretch.place[user][0] == middle.stop, propagate_meta=False
        )
    for i in reversed(middle):
        for node in reversed(stretch.layers[i]):
            graph.erase_node(node)
    for node, (i, _) in own.items():
        if i in middle:
            graph.erase_node(node)
