"""The graph of a model of four layers -> that of the whole model: the second half of
:mod:`mindspeed_fx.partition.shorten`.

A joint graph has its layers twice, forward and, in the other order, backward; an inference graph once. Each such
stretch gets copies of its second layer behind it. What a copy reads follows from what the layers beside it read: the
input of its own number, what the layer before it makes, what its own forward made, or what all share. Where that cannot
be said of an argument, or anything else reads a layer between the outer ones, :class:`LayersDiffer` is raised.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Sequence

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import aot_inputs, fake, inductor, partitioner
from mindspeed_fx.partition import repeats
from mindspeed_fx.partition.shorten import BEFORE, KEPT, Shortened
from mindspeed_fx.partition.stretch import LayersDiffer, Row, Source, Stretch, source, stretches


def unroll(gm: fx.GraphModule, short: Shortened, inputs: Sequence[Any]) -> list[Any]:
    """Give ``gm`` the layers that ``short`` left out, in place, and its compiled form their inputs.

    Args:
        gm: joint or inference graph traced from the short one; nodes have ``meta["val"]``.
        inputs: what it was traced with.

    Returns:
        What the whole graph is compiled with.

    Raises:
        LayersDiffer: its layers are not alike, or are read one by one.
    """
    if why := aot_inputs.why_fixed():
        raise LayersDiffer(why)
    with fake.past_modes():
        whole = _Unrolled(gm.graph, short)
        whole.add_inputs()
        for stretch in whole.stretches:
            whole.add_layers(stretch)
        whole.rewire()
        inductor.number_seeds(gm.graph)
    whole.add_gradients()
    gm.graph.lint()
    aot_inputs.give_inputs(whole.like, short.kept)
    traced = dict(zip(short.kept, inputs, strict=True))
    return [traced[p] if p in traced else whole.inputs[p].meta["val"] for p in range(short.inputs)]


SEED = Source("seed")
"""Every layer draws with a seed of its own, which nothing else reads."""


class _Unrolled:
    """A graph on its way from few layers to all; in :class:`Stretch` layers have the numbers of those kept."""

    def __init__(self, graph: fx.Graph, short: Shortened):
        self.graph, self.short, self.more = graph, short, short.left_out
        placeholders = [n for n in graph.nodes if partitioner.is_input(n)]
        if len(placeholders) != len(short.kept):
            raise LayersDiffer(f"the traced graph has {len(placeholders)} inputs for {len(short.kept)}")
        self.inputs = dict(zip(short.kept, placeholders))
        """Of each position among the whole model's inputs its placeholder."""
        self.own = {
            self.inputs[p]: (self._shortened(i), name) for p, (i, name) in short.own.items() if p in self.inputs
        }
        """Of each placeholder that layers have for themselves: number among the kept layers, and name."""
        self.position = {where: p for p, where in short.own.items()}
        kept = {p: i for i, p in enumerate(short.kept)}
        self.like = [
            kept[p] if p in kept else kept[self.position[BEFORE - 1, short.own[p][1]]] for p in range(short.inputs)
        ]
        """Of each position the input of the short graph that is, or stands for, the input there."""
        is_joint = any(n.op == "placeholder" and not partitioner.is_input(n) for n in graph.nodes)
        self.gradients = len(short.kept) if is_joint else 0
        """How many of the last results are gradients."""
        self.stretches = self._find()
        self.sources = {s: dict(self._sources(s)) for s in self.stretches}
        self._check_readers()
        self.layers: dict[Stretch, list[list[fx.Node]]] = {}

    def _shortened(self, layer: int) -> int:
        return layer if layer < BEFORE else layer - self.more

    def _find(self) -> list[Stretch]:
        """The stretches that read inputs of layers, or others of these, in order; of no more layers than were kept, for
        layers of two kinds in turn are calls of one kind where they differ in what they read alone."""
        calls = [n for n in self.graph.nodes if n.op == "call_function" and not inductor.is_seed(n)]
        pieces, matches = [(0, len(calls))], []
        while pieces:
            start, end = pieces.pop()
            candidates = stretches(calls[start:end], repeats.LEAST_CALLS)
            first, last, stretch = next((c for c in candidates if len(c[2].layers) <= KEPT), (0, 0, None))
            if stretch is not None:
                matches.append((start + first, stretch))
                pieces += [(start, start + first), (start + last, end)]
        known, results = set(self.own), []
        for _, stretch in sorted(matches, key=lambda m: m[0]):
            if any(a in known for nodes in stretch.layers for n in nodes for a in n.all_input_nodes):
                results.append(stretch)
                known.update(stretch.place)
        if not results:
            raise LayersDiffer("no layers are alike once they are traced")
        return results

    def _member(self, node: Any) -> tuple[Row, int, int] | None:
        if node in self.own:
            layer, name = self.own[node]
            return ("input", name), layer, KEPT
        for number, stretch in enumerate(self.stretches):
            if node in stretch.place:
                layer, call = stretch.place[node]
                return (number, call), layer, len(stretch.layers)
        return None

    def _sources(self, stretch: Stretch) -> Iterator[tuple[tuple[int, int], Source]]:
        for where, nodes in stretch.reads():
            if all(map(inductor.is_seed, nodes)):
                yield where, SEED
            else:
                yield where, Source(None, node=nodes[0]) if _are_equal(nodes) else source(nodes, self._member)

    def _check_readers(self) -> None:
        """Of every stretch, and of the inputs of layers, one layer between the outer ones is read by layers alone: what
        reads others is of layers that are cut, not of all. Gradients leave as such.
        """
        within = {n for s in self.stretches for n in s.place}
        output = self.graph.output_node()
        results = set(output.args[0][: len(output.args[0]) - self.gradients])

        def read_outside(node: fx.Node) -> bool:
            return node in results or any(u not in within and u is not output for u in node.users)

        inputs = [[n for n, (i, _) in self.own.items() if i == layer] for layer in range(KEPT)]
        for layers in (inputs, *(s.layers for s in self.stretches)):
            if all(any(map(read_outside, nodes)) for nodes in layers[1:-1]):
                read = next(filter(read_outside, layers[1]))
                raise LayersDiffer(f"{read.name} of a layer is read by what is of no layer")

    # ------------------------------------------------------------ what a layer of the whole model reads

    def _read(self, origin: Source, layer: int) -> fx.Node | None:
        """What layer ``layer`` reads where ``origin`` says so; None for an outer one that reads something else."""
        if origin.row is None or origin is SEED:
            return origin.node
        kind, name = origin.row  # type: ignore[misc]
        number = origin.sign * layer + origin.shift + (self.more if origin.sign < 0 else 0)
        if kind == "input":
            position = self.position.get((number, name))
            return None if position is None else self.inputs[position]
        layers = self.layers[self.stretches[kind]]
        return layers[number][name] if 0 <= number < len(layers) else None

    # ------------------------------------------------------------ steps

    def add_inputs(self) -> None:
        """A placeholder for each input of the whole model, in their order, before all else."""
        taken = {n.name for n in self.graph.nodes}
        names = (name for i in itertools.count(len(self.inputs) + 1) if (name := f"primals_{i}") not in taken)
        for p in reversed(range(self.short.inputs)):
            first = next(iter(self.graph.nodes))
            if p not in self.inputs:
                template = self.inputs[self.short.kept[self.like[p]]]
                with self.graph.inserting_before(first):
                    self.inputs[p] = self.graph.placeholder(next(names))
                self.inputs[p].meta = {**template.meta, "val": fake.fresh(template.meta["val"], {})}
            elif self.inputs[p] is not first:
                first.prepend(self.inputs[p])
            if "desc" in self.inputs[p].meta:
                self.inputs[p].meta["desc"] = aot_inputs.renumber(self.inputs[p].meta["desc"], p)

    def add_layers(self, stretch: Stretch) -> None:
        """Copies of the stretch's second layer behind it."""
        template = stretch.layers[BEFORE - 1]
        layers = self.layers[stretch] = stretch.layers[:BEFORE]
        rows = [repeats.arguments(n) for n in template]
        inside = {n: k for k, n in enumerate(template)}
        with self.graph.inserting_before(stretch.layers[BEFORE][0]):
            for layer in range(BEFORE, BEFORE + self.more):
                calls: list[fx.Node] = []
                layers.append(calls)
                storages: dict[int, torch.Tensor] = {}
                for k, node in enumerate(template):
                    new_arguments = []
                    for j, old in enumerate(rows[k]):
                        origin = self.sources[stretch].get((k, j))
                        if origin is SEED:
                            new = _copy(self.graph, old, old.all_input_nodes)
                        else:
                            new = calls[inside[old]] if origin is None else self._read(origin, layer)
                        if new is None:
                            raise LayersDiffer(f"{node.name} reads {old.name}, which not every layer has")
                        fake.match_storages(old.meta.get("val"), new.meta.get("val"), storages)
                        new_arguments.append(new)
                    calls.append(_copy(self.graph, node, new_arguments))
                    calls[-1].meta["val"] = fake.fresh(node.meta.get("val"), storages)
        layers += stretch.layers[BEFORE:]
        self._number_regions(stretch)

    def _number_regions(self, stretch: Stretch) -> None:
        """Checkpointed regions have numbers that grow: those of copies follow their layer's, others come after them."""
        first, second = (stretch.layers[i] for i in (BEFORE - 1, BEFORE))
        regions = [(partitioner.region(a), partitioner.region(b)) for a, b in zip(first, second)]
        steps = {b - a for a, b in regions if a is not None and b is not None}
        if not steps:
            return
        if len(steps) > 1:
            raise LayersDiffer("layers have different numbers of checkpointed regions")
        step = steps.pop()
        layers = self.layers[stretch]
        for i, calls in enumerate(layers[BEFORE : BEFORE + self.more], 1):
            for node in calls:
                partitioner.move_region(node, i * step)
        node = layers[BEFORE + self.more][0]
        while node.op != "root":
            partitioner.move_region(node, self.more * step)
            node = node.next

    def rewire(self) -> None:
        """What the layers that were there read now that there are more; views of it lie in its memory."""
        before = {n: (n.meta.get("val"), repeats.arguments(n)) for s in self.stretches for n in s.place}
        for stretch in self.stretches:
            for layer, calls in enumerate(self.layers[stretch]):
                if calls[0] not in stretch.place:
                    continue
                for (k, j), origin in self.sources[stretch].items():
                    arguments = repeats.arguments(calls[k])
                    new = self._read(origin, layer)
                    if new is not None and new is not arguments[j]:
                        arguments[j] = new
                        calls[k].args, calls[k].kwargs = _with_arguments(calls[k], arguments)
        added = {n for s in self.stretches for calls in self.layers[s] for n in calls if n not in s.place}
        for node in self.graph.nodes:
            if node.op == "call_function" and node not in added:
                storages: dict[int, Any] = {}
                now = repeats.arguments(node)
                for old, new in zip(before.get(node, ((), now))[1], now):
                    was, value = before.get(old, (old.meta.get("val"),))[0], new.meta.get("val")
                    if was is not value:
                        fake.match_storages(was, value, storages)
                node.meta["val"] = fake.moved(node.meta.get("val"), storages)

    def add_gradients(self) -> None:
        """The gradients of all inputs, in their order."""
        if not self.gradients:
            return
        output = self.graph.output_node()
        results = list(output.args[0])
        split = len(results) - self.gradients
        gradients: dict[int, Any] = dict(zip(self.short.kept, results[split:]))
        rows: dict[Any, list[int]] = {}
        for p, (_, name) in sorted(self.short.own.items(), key=lambda own: own[1][0]):
            rows.setdefault(name, []).append(p)
        for name, positions in rows.items():
            origin = source([gradients[p] for p in positions if p in gradients], self._member)
            for layer, p in enumerate(positions):
                new = self._read(origin, layer)
                if new is None and origin.row is not None and p not in gradients:
                    raise LayersDiffer(f"not every layer has a gradient of {name}")
                gradients[p] = gradients.get(p) if new is None else new
        output.args = (type(output.args[0])([*results[:split], *(gradients[p] for p in range(self.short.inputs))]),)
        if "desc" in output.meta:
            output.meta["desc"] = self._descriptions(output.meta["desc"], split)

    def _descriptions(self, old: Any, split: int) -> list[Any]:
        leaves = pytree.tree_leaves(old, is_leaf=lambda x: x is None)
        return [*leaves[:split], *(aot_inputs.renumber(leaves[split + i], p) for p, i in enumerate(self.like))]


def _are_equal(nodes: Sequence[fx.Node]) -> bool:
    """Whether all are constants of the graph with the same elements, of which tracing makes one for each use."""
    if any(n.op != "get_attr" for n in nodes):
        return False
    values = [getattr(n.graph.owning_module, str(n.target)) for n in nodes]
    return all(isinstance(v, torch.Tensor) and v.numel() == 1 for v in values) and len({v.item() for v in values}) == 1


def _copy(graph: fx.Graph, node: fx.Node, arguments: Sequence[fx.Node]) -> fx.Node:
    new = graph.create_node(node.op, node.target, *_with_arguments(node, arguments), node.name)
    new.meta = dict(node.meta)
    return new


def _with_arguments(node: fx.Node, arguments: Sequence[fx.Node]) -> tuple[Any, Any]:
    """What a call has for args and kwargs, with other nodes in the order of :func:`repeats.arguments`."""
    following = iter(arguments)
    return fx.map_arg((node.args, node.kwargs), lambda _: next(following))
