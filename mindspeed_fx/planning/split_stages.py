"""The graph of a training step, cut between layers: one graph for each stage of a pipeline.

A node inside a layer belongs to the layer's stage; what is computed from layers' results to the last stage that it
reads from; what comes before the layers (an embedding) to the first stage that needs it. What comes of the model's
arguments alone (positions, angles, masks) is not sent but computed again by every stage that reads it. What a stage
makes and a later one reads goes from neighbour to neighbour. Source of the terms: torch.distributed.pipelining.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Iterator, Sequence

import torch
import torch.fx as fx
from torch import nn

from mindspeed_fx.capture import isolate
from mindspeed_fx.compat import fake, fx_graph, tracing
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.graph.writes import written_by
from mindspeed_fx.planning.layer_lists import Layers, layers_of
from mindspeed_fx.planning.random_calls import draws_numbers
from mindspeed_fx.report.source import source_line
from mindspeed_fx.sharding.between_stages import RECEIVED
from mindspeed_fx.sharding.constraint import operands
from mindspeed_fx.sharding.plan import ShardingError

STATE = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")
"""Calls that change how the following ones run: in every stage."""


@dataclass
class Part:
    """The graph of one stage: ``gm(*values of given, *received)`` -> what the next stage receives, or the model's
    results.
    """

    gm: fx.GraphModule
    inputs: list[fx.Node]
    """Placeholders of the whole graph."""
    received: list[fx.Node]
    sent: list[fx.Node]
    """Nodes of the whole graph, as ``received``."""


def split_stages(gm: fx.GraphModule, layers: Layers, stages: int, sizes: Sequence[int] | None = None) -> list[Part]:
    """The graphs of all stages; layer i of n is in stage i * stages // n, so that none has more than ceil(n / stages).
    Of several lists the layers are counted in the order in which they run.

    Args:
        gm: Dynamo's graph of the whole step, parameters as placeholders; stays as it is, but for regions of vmap, which
            become bodies of their own: the calls that leave one have no users, and no stage would have them.
        layers: see :func:`~mindspeed_fx.planning.layer_lists.layers_of`; where several do not run one after the other,
            the first alone.
        sizes: how many layers each stage has.

    Raises:
        ShardingError: layers that run in another order, values that cannot be sent, with module and line; sizes that
            are not those of the model; a transform of torch.func that cannot be moved whole.
    """
    if reason := isolate(gm):
        raise ShardingError(reason)
    try:
        homes = _Homes(gm, layers, stages, sizes)
    except LayerOrderError:
        if len(layers) == 1 or layers[0][1] < stages:
            raise
        homes = _Homes(gm, layers[:1], stages, sizes)
    return [_part(gm, homes, s) for s in range(stages)]


def why_no_stages(gm: fx.GraphModule, model: nn.Module) -> str:
    """Why ``gm``, Dynamo's graph of ``model``, cannot be cut; "" where it can, or has too few layers for any stages."""
    try:
        layers = layers_of(model, 2)
    except ShardingError:
        return ""
    try:
        split_stages(fx.GraphModule(gm, copy.deepcopy(gm.graph)), layers, 2)
    except ShardingError as error:
        return str(error)
    return ""


class LayerOrderError(ShardingError):
    """Layers that do not run in the order of their list, or not at all."""


def tied_parameters(parts: list[Part]) -> dict[fx.Node, list[int]]:
    """Trainable parameters that several stages read -> these stages."""
    stages: dict[fx.Node, list[int]] = {}
    for s, part in enumerate(parts):
        for n in part.inputs:
            if is_parameter(n) and fx_graph.example_value_of(n).requires_grad:
                stages.setdefault(n, []).append(s)
    return {n: readers for n, readers in stages.items() if len(readers) > 1}


class _Homes:
    """Which stage computes each node; ``again`` are those that every stage that reads them computes for itself."""

    def __init__(self, gm: fx.GraphModule, layers: Layers, stages: int, sizes: Sequence[int] | None = None):
        self.gm, self.stages = gm, stages
        self.nodes = [n for n in gm.graph.nodes if n.op != "output"]
        self.output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
        self.state = [n for n in self.nodes if n.op == "call_function" and getattr(n.target, "__name__", "") in STATE]
        self.stage: dict[fx.Node, int] = {}
        self.again: set[fx.Node] = set()
        self.readers: dict[fx.Node, set[int]] = {}
        """Stages that read a node, also through nodes that are computed again."""
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        """What writes in place to the memory of a node that stages compute again, and is computed again with it."""
        self.layers = self._in_order(layers)
        self.homes = _stage_of_each([n for _, n in self.layers], stages, sizes)
        self._after_layers()
        self._before_layers()
        self._find_readers()
        self._check_writes()
        self._check_sent()

    def _in_order(self, layers: Layers) -> Layers:
        """The lists in the order in which they begin to run."""
        self.layers = layers
        begun: dict[int, None] = {}
        for n in self.nodes if len(layers) > 1 else ():
            if (layer := self._layer(n)) is not None:
                begun.setdefault(layer[0])
        return tuple(layers[i] for i in (*begun, *(i for i in range(len(layers)) if i not in begun)))

    def _after_layers(self) -> None:
        seen = set()
        for n in self.nodes:
            if n.op in ("placeholder", "get_attr") or n in self.state:
                continue
            read = max((self.stage[a] for a in n.all_input_nodes if a in self.stage), default=None)
            layer = self._layer(n)
            if layer is not None:
                seen.add(layer)
                mine = self.homes[layer[0]][layer[1]]
                if read is not None and read > mine:
                    raise LayerOrderError(
                        f"{_where(n)}: layer {layer[1]} of {self.layers[layer[0]][0]} reads what a later layer makes; "
                        "stages need layers that run in the order of their list"
                    )
                self.stage[n] = mine
            elif read is not None:
                self.stage[n] = read
        for i, (path, count) in enumerate(self.layers):
            if missing := [number for number in range(count) if (i, number) not in seen]:
                raise LayerOrderError(
                    f"layers {', '.join(map(str, missing))} of {path} do not run in this step; stages need all of them"
                )

    def _before_layers(self) -> None:
        mine = {n for n in self.nodes if is_parameter(n)}
        for n in self.nodes:
            if (
                n not in self.stage
                and n not in self.state
                and (n in mine or any(a in mine for a in n.all_input_nodes) or draws_numbers(self.gm, n))
            ):
                mine.add(n)
        for n in reversed(self.nodes):
            if n in self.stage or n in self.state:
                continue
            readers = [
                self.stages - 1 if u is self.output else self.stage[u]
                for u in n.users
                if u is self.output or u in self.stage
            ]
            if n not in mine or n.op in ("placeholder", "get_attr") or not readers:
                self.again.add(n)
            else:
                self.stage[n] = min(readers)

    def _layer(self, n: fx.Node) -> tuple[int, int] | None:
        """Number of the list, and of the layer in it."""
        for path in self._paths(n):
            for i, (layers, _) in enumerate(self.layers):
                if path.startswith(f"{layers}.") or not layers:
                    number = path[len(layers) :].lstrip(".").partition(".")[0]
                    if number.isdigit():
                        return i, int(number)
        return None

    def _paths(self, n: fx.Node) -> Iterator[str]:
        """Of the node's module and, for a checkpointed region, of the modules inside."""
        yield module_path(n)
        if n.op == "call_function" and tracing.is_higher_order(n.target):
            for body, _ in operands(self.gm, n):
                for inner in body.graph.nodes:
                    yield from self._paths(inner) if inner.op == "call_function" else ()

    def _find_readers(self) -> None:
        for n in reversed(self.nodes):
            results: set[int] = set()
            for u in n.users:
                results |= (
                    {self.stages - 1}
                    if u is self.output
                    else {self.stage[u]}
                    if u in self.stage
                    else self.readers.get(u, set())
                )
            self.readers[n] = results

    def _check_writes(self) -> None:
        """What is written in place, through whichever view, must be of one stage: others would not see it."""
        writers = {n: nodes for n in self.nodes if (nodes := written_by(n))}
        values = {n: fx_graph.example_value_of(n) for n in self.nodes if writers}
        storages = {n: fake.storage_of(value) for n, value in values.items() if isinstance(value, torch.Tensor)}
        for writer, written in writers.items():
            changed = {storages[n] for n in written if n in storages}
            same = [n for n, storage in storages.items() if storage in changed]
            if not changed or self._is_made_by_each(writer, same):
                continue
            stages = set().union(
                *(self.readers[n] | ({self.stage[n]} if n in self.stage else set()) for n in (writer, *same))
            )
            alike = (w for w in writers if any(storages.get(n) in changed for n in writers[w]))
            if len(stages) > 1 and not self._is_sent_written(list(alike), same):
                raise ShardingError(
                    f"{_where(writer)}: {writer.name} writes in place to what stages "
                    f"{' and '.join(map(str, sorted(stages)))} read; stages share no memory"
                )
            if writer not in self.stage:
                raise ShardingError(
                    f"{_where(writer)}: {writer.name} writes in place to what comes before the layers; stages cannot "
                    "tell who reads it"
                )

    def _is_sent_written(self, writers: list[fx.Node], same: list[fx.Node]) -> bool:
        """Whether one stage makes the memory of the nodes ``same`` and has all its ``writers``, and other stages read
        it behind them: they get what was written."""
        stages = {self.stage.get(n) for n in writers}
        last = max(self.nodes.index(n) for n in writers)
        for n in self.nodes[:last]:
            if n in same or any(a in same for a in n.all_input_nodes):
                stages |= {self.stage[n]} if n in self.stage else self.readers[n]
        return len(stages) == 1 and None not in stages

    def _is_made_by_each(self, writer: fx.Node, same: list[fx.Node]) -> bool:
        """Whether every stage that reads what ``writer`` writes makes it anew, the writes included (:attr:`writers`).

        Args:
            same: nodes of that memory.
        """
        nodes = {writer, *same}
        if any(n not in self.again or n.op not in ("call_function", "call_method") for n in nodes):
            return False
        if any(a not in self.again for n in nodes for a in n.all_input_nodes) or draws_numbers(self.gm, writer):
            return False
        for n in nodes:
            self.writers.setdefault(n, []).append(writer)
        return True

    def _check_sent(self) -> None:
        for n, s in self.stage.items():
            value = fx_graph.example_value_of(n)
            if max(self.readers[n], default=s) > s and not (
                isinstance(value, torch.Tensor) and value.is_floating_point()
            ):
                raise ShardingError(
                    f"{_where(n)}: stage {s} makes {n.name}, which a later stage reads; stages send floating-point "
                    "tensors alone"
                )

    def crossing(self, boundary: int) -> list[fx.Node]:
        """What goes from stage ``boundary`` to the next."""
        return [
            n for n in self.nodes if n in self.stage and self.stage[n] <= boundary < max(self.readers[n], default=-1)
        ]


def _stage_of_each(counts: list[int], stages: int, sizes: Sequence[int] | None) -> list[list[int]]:
    """The stage of each layer of each list.

    Raises:
        ShardingError: sizes that are not those of the model.
    """
    total = sum(counts)
    if sizes is None:
        stage = [i * stages // total for i in range(total)]
    else:
        if len(sizes) != stages or sum(sizes) != total:
            raise ShardingError(
                f"layers={list(sizes)}; valid: {stages} numbers from 1, {total} together, one for each stage"
            )
        stage = [s for s, size in enumerate(sizes) for _ in range(size)]
    remaining = iter(stage)
    return [[next(remaining) for _ in range(count)] for count in counts]


def _part(gm: fx.GraphModule, homes: _Homes, s: int) -> Part:
    last = s == homes.stages - 1
    received, sent = homes.crossing(s - 1) if s else [], [] if last else homes.crossing(s)
    wanted = [n for n in homes.nodes if homes.stage.get(n) == s]
    needed, todo = {*wanted, *homes.state}, [*wanted, *(homes.output.all_input_nodes if last else ())]
    while todo:  # what every stage computes for itself, where it is read
        n = todo.pop()
        if n in homes.again:
            needed.add(n)
        todo += [a for a in (*n.all_input_nodes, *homes.writers.get(n, ())) if a in homes.again and a not in needed]
    graph, copy = fx.Graph(), {}
    arguments = [n for n in homes.nodes if n.op == "placeholder" and n in needed]
    for n in arguments:
        copy[n] = graph.node_copy(n)
    for i, n in enumerate(received):
        copy[n] = graph.placeholder(f"{RECEIVED}{i}")
        copy[n].meta["example_value"] = receivable(fx_graph.example_value_of(n))
    for n in homes.nodes:
        if n in needed and n not in copy:
            copy[n] = graph.node_copy(n, copy.__getitem__)
    graph.output(fx.map_arg(homes.output.args[0], copy.__getitem__) if last else tuple(copy[n] for n in sent))
    graph.lint()
    return Part(fx.GraphModule(gm, graph), arguments, received, sent)


def receivable(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor as the next stage gets it: contiguous, and a leaf."""
    return torch.empty_like(value.detach(), memory_format=torch.contiguous_format).requires_grad_(value.requires_grad)


def is_parameter(n: fx.Node) -> bool:
    return n.op == "placeholder" and isinstance(fx_graph.example_value_of(n), nn.Parameter)


def _where(n: fx.Node) -> str:
    module, line = module_path(n), source_line(n)
    return f'module "{module}"' + (f", {line}" if line else "")
