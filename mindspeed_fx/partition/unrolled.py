"""One graph of a few layers on its way to that of all: what :mod:`mindspeed_fx.partition.unroll` does to each side."""

from __future__ import annotations

import itertools
from typing import Any, Iterable, Iterator, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import aot_inputs, fake, inductor
from mindspeed_fx.partition import repeats
from mindspeed_fx.partition.shorten import BEFORE, KEPT, Shortened
from mindspeed_fx.partition.stretch import LayersDiffer, Row, Source, Stretch, source, stretches

Member = tuple[Row, int, int]
"""Row, number in it, and how many members the row has."""


class Unrolled:
    """A graph on its way from few layers to all. Members of rows, and layers of a :class:`Stretch`, have the numbers of
    those kept, from 0; in :attr:`position`, :attr:`layers` and :meth:`read` those of the whole model.

    Args:
        graph: nodes have ``meta["val"]``; every placeholder is an input that ``short`` knows.
        short: what it lacks.
        outside: how many of the results are read as they are; those behind are of layers, one by one.
        by_place: of a graph that gets its row of seeds from outside, of each seed's place in that row which seed it is.
    """

    def __init__(self, graph: fx.Graph, short: Shortened, outside: int, by_place: dict[int, Member] | None = None):
        self.graph, self.short, self.more, self.outside = graph, short, short.left_out, outside
        placeholders = graph.find_nodes(op="placeholder")
        if len(placeholders) != len(short.kept):
            raise LayersDiffer(f"the traced graph has {len(placeholders)} inputs for {len(short.kept)}")
        self.was = {n: n.meta.get("val") for n in graph.nodes}
        """The fake values before any of those that are kept is changed."""
        if fake.has_symbols(list(self.was.values())):
            raise LayersDiffer("sizes are told by data")
        self.inputs = dict(zip(short.kept, placeholders))
        """Of each position among the whole model's inputs its placeholder."""
        self.position = {where: p for p, where in short.own.items()}
        kept: dict[Any, list[int]] = {}
        for layer, name in sorted((short.own[p] for p in short.kept if p in short.own), key=lambda own: own[0]):
            kept.setdefault(name, []).append(layer)
        self.own: dict[fx.Node, Member] = {}
        """Inputs that layers have for themselves, and the seeds that they draw by."""
        for p, node in self.inputs.items():
            if p in short.own:
                layer, name = short.own[p]
                self.own[node] = ("input", name), kept[name].index(layer), len(kept[name])
        index = {p: i for i, p in enumerate(short.kept)}
        self.like = [index[p if p in index else self._template(p, kept)] for p in range(short.inputs)]
        """Of each position which input of the short graph is, or stands for, the input there."""
        places = ((n, inductor.place_of_seed(n)) for n in graph.nodes)
        self.own.update((n, by_place[place]) for n, place in places if by_place and place in by_place)
        self.stretches = self._find()
        self.sources = {s: dict(self._sources(i, s)) for i, s in enumerate(self.stretches)}
        self._check_readers()
        self.layers: dict[Stretch, list[list[fx.Node]]] = {}
        self.seeds: dict[Row, dict[int, fx.Node]] = {}
        for node, (row, number, _) in self.own.items():
            if row[0] == "seed":
                self.seeds.setdefault(row, {})[self.whole(number)] = node

    def _template(self, position: int, kept: dict[Any, list[int]]) -> int:
        """The input that one which was left out is like: that of the last layer before it."""
        layer, name = self.short.own[position]
        return self.position[max(i for i in kept[name] if i < layer), name]

    def whole(self, number: int) -> int:
        """The number in the whole model of a member that was kept."""
        return number if number < BEFORE else number + self.more

    # ------------------------------------------------------------ what the layers are

    def _find(self) -> list[Stretch]:
        """The stretches that read inputs of layers, or others of these, in order; of no more layers than were kept, for
        layers of two kinds in turn are calls of one kind where they differ in what they read alone."""
        calls = [n for n in self.graph.nodes if n.op == "call_function" and not inductor.is_seed(n)]
        number = {n: i for n, (_, i, _) in self.own.items()}
        pieces, matches = [(0, len(calls))], []
        while pieces:
            start, end = pieces.pop()
            for first, last, stretch in stretches(calls[start:end], least=1):
                if len(stretch.layers) <= KEPT and _is_of_layers(stretch, number):
                    matches.append((start + first, stretch))
                    pieces += [(start, start + first), (start + last, end)]
                    number.update((n, i) for n, (i, _) in stretch.place.items())
                    break
        if not matches:
            raise LayersDiffer("no layers are alike once they are traced")
        return [stretch for _, stretch in sorted(matches, key=lambda m: m[0])]

    def member(self, node: Any) -> Member | None:
        """Which member of which row a node is; None for what is of no layer."""
        if node in self.own:
            return self.own[node]
        for number, stretch in enumerate(self.stretches):
            if node in stretch.place:
                layer, call = stretch.place[node]
                return (number, call), layer, len(stretch.layers)
        return None

    def _sources(self, number: int, stretch: Stretch) -> Iterator[tuple[tuple[int, int], Source]]:
        for where, nodes in stretch.reads():
            if all(map(inductor.is_seed, nodes)) and len(set(nodes)) == len(nodes):
                for i, n in enumerate(nodes):
                    self.own.setdefault(n, (("seed", (number, where)), i, len(nodes)))
            yield where, Source(None, node=nodes[0]) if _are_equal(nodes) else source(nodes, self.member)

    def _check_readers(self) -> None:
        """Of what has a member for each layer, one between the outer ones is read by layers alone: what reads others is
        of layers that were kept, not of all."""
        within = {n for s in self.stretches for n in s.place}
        output = self.graph.output_node()
        results = set(output.args[0][: self.outside])

        def read_outside(node: fx.Node) -> bool:
            return node in results or any(u not in within and u is not output for u in node.users)

        inputs: dict[Row, list[fx.Node]] = {}
        for node, (row, _, _) in sorted(self.own.items(), key=lambda item: item[1][1]):
            inputs.setdefault(row, []).append(node)
        rows: Iterable[Sequence[fx.Node]] = (row for s in self.stretches for row in zip(*s.layers))
        for row in itertools.chain(inputs.values(), rows):
            if row[1:-1] and all(map(read_outside, row[1:-1])):
                raise LayersDiffer(f"{row[1].name} of a layer is read by what is of no layer")

    def read(self, origin: Source, layer: int) -> fx.Node | None:
        """What layer ``layer`` reads where ``origin`` says so; None for an outer one that reads something else."""
        if origin.row is None:
            return origin.node
        number = origin.sign * layer + origin.shift + (self.more if origin.sign < 0 else 0)
        return self.node(origin.row, number)

    def node(self, row: Any, number: int) -> fx.Node | None:
        """A member of a row in the whole model; None where it has none of this number."""
        kind, name = row
        if kind == "input":
            position = self.position.get((number, name))
            return None if position is None else self.inputs[position]
        if kind == "seed":
            return self._seed(row, number)
        layers = self.layers[self.stretches[kind]]
        return layers[number][name] if 0 <= number < len(layers) else None

    def _seed(self, row: Row, number: int) -> fx.Node | None:
        """Every layer draws with a seed of its own; those of copies stand where their layers do among the others."""
        members = self.seeds[row]
        if number not in members and BEFORE <= number < BEFORE + self.more:
            behind = {m[BEFORE + self.more] for m in self.seeds.values()}
            template = members[BEFORE - 1]
            with self.graph.inserting_before(next(n for n in self.graph.nodes if n in behind)):
                members[number] = _copy(self.graph, template, template.all_input_nodes)
        return members.get(number)

    # ------------------------------------------------------------ steps

    def add_inputs(self, prefix: str, saved: Sequence[fx.Node] | None = None) -> None:
        """A placeholder for each input of the whole model, in their order, before all else.

        Args:
            prefix: what the names of new ones begin with.
            saved: of a backward what its forward saves, the first of its inputs.
        """
        taken = {n.name for n in self.graph.nodes}
        names = (name for i in itertools.count(len(self.inputs) + 1) if (name := f"{prefix}_{i}") not in taken)
        first = next(iter(self.graph.nodes))
        for p in reversed(range(self.short.inputs)):
            template = self.inputs.get(p) or self.inputs[self.short.kept[self.like[p]]]
            returned = saved[p] if saved and p < len(saved) else None
            value, storages = template.meta.get("val"), dict[int, Any]()
            # a lowered forward may say of a value another type than the trace that its backward is of
            if returned is not None and _dtype(returned.meta.get("val")) == _dtype(value):
                fake.match_storages(value, returned.meta.get("val"), storages)
            if p not in self.inputs:
                with self.graph.inserting_before(first):
                    self.inputs[p] = self.graph.placeholder(next(names))
                self.inputs[p].meta = {**template.meta, "val": fake.fresh(value, storages)}
            else:
                if template is not first:
                    first.prepend(template)
                template.meta["val"] = fake.moved(value, storages)
            first = self.inputs[p]
            if returned is not None and "desc" in returned.meta:
                first.meta["desc"] = returned.meta["desc"]
            elif saved is None and "desc" in first.meta:
                first.meta["desc"] = aot_inputs.renumber(first.meta["desc"], p)

    def add_layers(self) -> None:
        """Copies of each stretch's second layer behind it."""
        for stretch in self.stretches:
            template = stretch.layers[BEFORE - 1]
            layers = self.layers[stretch] = stretch.layers[:BEFORE]
            arguments = [repeats.arguments(n) for n in template]
            inside = {n: k for k, n in enumerate(template)}
            with self.graph.inserting_before(stretch.layers[BEFORE][0]):
                for layer in range(BEFORE, BEFORE + self.more):
                    layers.append(calls := [])
                    storages: dict[int, torch.Tensor] = {}
                    for k, node in enumerate(template):
                        read = []
                        for j, old in enumerate(arguments[k]):
                            origin = self.sources[stretch].get((k, j))
                            new = calls[inside[old]] if origin is None else self.read(origin, layer)
                            if new is None:
                                raise LayersDiffer(f"{node.name} reads {old.name}, which not every layer has")
                            fake.match_storages(self.was.get(old), new.meta.get("val"), storages)
                            read.append(new)
                        calls.append(_copy(self.graph, node, read))
                        calls[-1].meta["val"] = self.was[calls[-1]] = fake.fresh(node.meta.get("val"), storages)
            layers += stretch.layers[BEFORE:]

    def rewire(self) -> None:
        """What the layers that were there read now that there are more; views of it lie in its memory."""
        before = {n: repeats.arguments(n) for s in self.stretches for n in s.place}
        for stretch in self.stretches:
            for layer, calls in enumerate(self.layers[stretch]):
                if calls[0] not in stretch.place:
                    continue
                for (k, j), origin in self.sources[stretch].items():
                    arguments = repeats.arguments(calls[k])
                    new = self.read(origin, layer)
                    if new is not None and new is not arguments[j]:
                        arguments[j] = new
                        calls[k].args, calls[k].kwargs = _with_arguments(calls[k], arguments)
        stale = {n for n, was in self.was.items() if n.meta.get("val") is not was}
        for node in self.graph.nodes:
            if node.op == "call_function" and (node in before or not stale.isdisjoint(node.all_input_nodes)):
                storages: dict[int, Any] = {}
                now = repeats.arguments(node)
                for old, new in zip(before.get(node, now), now):
                    if (was := self.was.get(old)) is not new.meta.get("val"):
                        fake.match_storages(was, new.meta.get("val"), storages)
                value = fake.moved(node.meta.get("val"), storages)
                if value is not node.meta.get("val"):
                    node.meta["val"] = value
                    stale.add(node)


def _dtype(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _is_of_layers(stretch: Stretch, number: dict[fx.Node, int]) -> bool:
    """Whether two neighbours between the outer ones read what neighbouring layers have, and not the same layer."""
    one, other = ({number[a] for n in calls for a in n.all_input_nodes if a in number} for calls in stretch.layers[1:3])
    return any(not other.isdisjoint({i + step for i in one}) for step in (1, -1))


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
