"""Graphs of a model of five layers -> those of the whole model: the second half of
:mod:`mindspeed_fx.partition.shorten`.

A graph gets copies of the second layer of each stretch of layers behind it: an inference graph, or a forward and then
its backward, where layers stand in the other order. What a copy reads follows from what the layers beside it read: the
input of its own number, what the layer before it makes, what its own forward saved, or what all share. Where that
cannot be said of an argument, or anything else reads a layer between the outer ones, :class:`LayersDiffer` is raised.
"""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Sequence

import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import aot_inputs, fake, inductor, partitioner
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.partition.shorten import BEFORE, Shortened
from mindspeed_fx.partition.stretch import LayersDiffer, source
from mindspeed_fx.partition.unrolled import Member, Unrolled


def unroll(gm: fx.GraphModule, short: Shortened, inputs: Sequence[Any]) -> list[Any]:
    """Give an inference graph the layers that ``short`` left out, in place, and its compiled form their inputs.

    Args:
        gm: traced from the short graph; nodes have ``meta["val"]``.
        inputs: what it was traced with.

    Returns:
        What the whole graph is compiled with.

    Raises:
        LayersDiffer: its layers are not alike, or are read one by one.
    """
    _refuse()
    with fake.past_modes():
        whole = Unrolled(gm.graph, short, outside=len(gm.graph.output_node().args[0]))
        _add(whole, "primals")
    _finish(gm)
    return _give_inputs(whole, inputs)


def unroll_both(
    forward: fx.GraphModule, backward: fx.GraphModule, short: Shortened, inputs: Sequence[Any], results: int
) -> list[Any]:
    """Give a forward and its backward, as they were cut, the layers that ``short`` left out, in place, and their
    compiled forms their inputs.

    Args:
        forward, backward: cut from a joint graph that was traced from the short one; nodes have ``meta["val"]``.
        inputs: what it was traced with.
        results: how many of the forward's results are its callers'; those behind are saved for the backward.

    Returns:
        What the whole forward is compiled with.

    Raises:
        LayersDiffer: layers are not alike, or are read one by one.
    """
    _refuse()
    with fake.past_modes():
        whole = Unrolled(forward.graph, short, results)
        seeds, again = {place: n for n, place in _seeds(forward)}, _seeds(backward)
        by_place = {place: whole.own[n] for place, n in seeds.items() if n in whole.own}
        _add(whole, "primals")
        missing, saved = _add_saved(whole, len(backward.graph.find_nodes(op="placeholder")))
        back = Unrolled(backward.graph, missing, outside=0, by_place=by_place)
        _add(back, "saved", saved)
        shared = [(n, seeds[place]) for n, place in again if n not in back.own]
        of_layers = [(n, whole.seeds[row][i]) for row, members in back.seeds.items() for i, n in members.items()]
        for node, seed in [*shared, *of_layers]:
            inductor.take_seed(node, inductor.place_of_seed(seed))
        _add_gradients(back, short)
    _finish(forward)
    _finish(backward)
    return _give_inputs(whole, inputs)


def _seeds(gm: fx.GraphModule) -> list[tuple[fx.Node, int]]:
    """What takes a seed from the row of them, with its place there."""
    readers = [(n, place) for n in gm.graph.nodes if (place := inductor.place_of_seed(n)) is not None]
    if len({n.args[0] for n, _ in readers}) > 1:
        raise LayersDiffer("there is a row of seeds for each of several devices")
    return readers


def _refuse() -> None:
    if why := aot_inputs.why_fixed():
        raise LayersDiffer(why)


def _add(whole: Unrolled, prefix: str, saved: Sequence[fx.Node] | None = None) -> None:
    whole.add_inputs(prefix, saved)
    whole.add_layers()
    whole.rewire()
    inductor.number_seeds(whole.graph)


def _finish(gm: fx.GraphModule) -> None:
    gm.graph.lint()
    recompile(gm)


def _give_inputs(whole: Unrolled, inputs: Sequence[Any]) -> list[Any]:
    aot_inputs.give_inputs(whole.like, whole.short.kept)
    traced = dict(zip(whole.short.kept, inputs, strict=True))
    return [traced[p] if p in traced else whole.inputs[p].meta["val"] for p in range(whole.short.inputs)]


def _add_saved(whole: Unrolled, inputs: int) -> tuple[Shortened, list[fx.Node]]:
    """What copies save for the backward, behind what the layer before them saves.

    Args:
        whole: a forward that has its copies.
        inputs: how many inputs the backward of the short graph has.

    Returns:
        Which of its inputs that backward lacks, and all that is saved.
    """
    output = whole.graph.output_node()
    results = list(output.args[0])
    before, saved = results[: whole.outside], results[whole.outside :]
    if any(partitioner.is_unchecked(n) for n in saved):
        raise LayersDiffer("what is saved is kept without autograd's check of versions")
    members = [whole.member(n) for n in saved]
    first = _saved_rows(members)
    kept, nodes, own = [], [], dict[int, tuple[int, Any]]()
    for i, number, node in _lengthened(whole, saved, members, first):
        if (member := members[i]) is not None and member[0] in first:
            own[len(nodes)] = number - first[member[0]], member[0]
        if node is saved[i]:
            kept.append(len(nodes))
        nodes.append((i, node))
    tangents = range(len(nodes), len(nodes) + inputs - len(saved))
    output.args = (type(output.args[0])([*before, *(n for _, n in nodes)]),)
    if "desc" in output.meta:
        old = pytree.tree_leaves(output.meta["desc"], is_leaf=lambda x: x is None)
        new = (aot_inputs.renumber(old[len(before) + i], k) for k, (i, _) in enumerate(nodes))
        output.meta["desc"] = [*old[: len(before)], *new]
    return Shortened(whole.more, (*kept, *tangents), len(nodes) + len(tangents), own), [n for _, n in nodes]


def _saved_rows(members: Sequence[Member | None]) -> dict[Any, int]:
    """Of each row whose members are saved in all layers between the outer ones, the first layer that is.

    Raises:
        LayersDiffer: of the two in the middle one is, and the other is not.
    """
    rows: dict[Any, list[int]] = {}
    for member in members:
        if member is not None:
            rows.setdefault(member[0], []).append(member[1])
    for row, numbers in rows.items():
        if (BEFORE - 1 in numbers) != (BEFORE in numbers) or len(set(numbers)) < len(numbers):
            raise LayersDiffer(f"{row} is saved in layers {numbers} of those traced")
    return {row: min(numbers) for row, numbers in rows.items() if BEFORE in numbers}


def _lengthened(
    whole: Unrolled, saved: Sequence[fx.Node], members: Sequence[Member | None], rows: dict[Any, int]
) -> Iterator[tuple[int, int, fx.Node]]:
    """Of all that the whole forward saves, in order: what it is like, the layer, and the value."""
    copied: dict[Any, list[int]] = {}
    for i, m in enumerate(members):
        if m is not None and m[0] in rows and m[1] == BEFORE - 1:
            copied.setdefault(m[0][0], []).append(i)  # inputs are saved before what calls make
    behind = {places[-1]: places for places in copied.values()}
    for i, (node, member) in enumerate(zip(saved, members)):
        yield i, 0 if member is None else whole.whole(member[1]), node
        for layer, k in itertools.product(range(BEFORE, BEFORE + whole.more), behind.get(i, ())):
            yield k, layer, whole.node(members[k][0], layer)


def _add_gradients(back: Unrolled, short: Shortened) -> None:
    """The gradients of all inputs, in their order.

    Args:
        back: a backward that has its copies, and returns the gradients of the inputs that were kept.
        short: of the forward.
    """
    output = back.graph.output_node()
    gradients: dict[int, Any] = dict(zip(short.kept, output.args[0], strict=True))
    rows: dict[Any, list[int]] = {}
    for p, (_, name) in sorted(short.own.items(), key=lambda own: own[1][0]):
        rows.setdefault(name, []).append(p)
    template: dict[int, int] = {}
    for name, positions in rows.items():
        kept = [p for p in positions if p in gradients]
        origin = source([gradients[p] for p in kept], back.member)
        for layer, p in enumerate(positions):
            new = back.read(origin, layer)
            if new is None and origin.row is not None and p not in gradients:
                raise LayersDiffer(f"not every layer has a gradient of {name}")
            template[p] = p if p in gradients else kept[BEFORE - 1]
            gradients[p] = gradients.get(p) if new is None else new
    if "desc" in output.meta:
        old = pytree.tree_leaves(output.meta["desc"], is_leaf=lambda x: x is None)
        of = dict(zip(short.kept, old))
        output.meta["desc"] = [aot_inputs.renumber(of[template.get(p, p)], p) for p in range(short.inputs)]
    output.args = (type(output.args[0])(gradients[p] for p in range(short.inputs)),)
