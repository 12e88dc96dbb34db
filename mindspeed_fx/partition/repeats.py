"""Stretches of a graph that repeat: the layers of a model, told by their operators alone.

A graph is read as the row of its calls, each with its operator, its constants and the sizes of its results. Where a
stretch of the row is followed by its like, and the calls of both read one another at the same places, each is a layer:
what it reads from elsewhere (its weights, the layer before it, masks that all share) are its inputs. Modules are not
asked, so that a layer may begin anywhere in its period; it begins where least is lost between two compiled apart, and
of such places where fewest values go from one to the next: each is a node more around every call.
Layers that talk to other ranks are not neighbours: there calls behind a collective are compared from their first on.
"""

from __future__ import annotations

import collections
import itertools
import operator
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import fx_graph, inductor, partitioner
from mindspeed_fx.graph import collectives, op_sets, storage

LEAST_LAYERS = 3
LEAST_CALLS = 16
"""Of a layer: code for fewer is made faster than it is called."""
CANDIDATES, RECENT = 48, 6
"""Lengths of a period that are looked at; like calls before a call, whose distances are lengths."""


@dataclass(frozen=True)
class Repeat:
    """Layers that are one graph."""

    layers: tuple[tuple[fx.Node, ...], ...]
    """The calls of each, in order."""
    inputs: tuple[tuple[fx.Node, ...], ...]
    """Of each layer what it reads from elsewhere, in one order; between its calls may stand what is made before all."""
    outputs: tuple[int, ...]
    """Positions in a layer of the calls whose memory is read elsewhere after any of them; no view is among them."""


def repeats(graph: fx.Graph) -> list[Repeat]:
    """The longest disjoint repetitions, in order of the graph, and of what is left the longest that begins alike behind
    calls that are like none; values need ``meta["val"]``."""
    calls = [n for n in graph.nodes if n.op == "call_function" and not is_made_before(n)]
    results, pieces = [], [calls]
    while pieces:
        piece = pieces.pop()
        longest = _longest(piece)
        if longest is None:
            continue
        start, end, repeat = longest
        results.append(repeat)
        pieces += [p for p in (piece[:start], piece[end:]) if len(p) >= LEAST_LAYERS * LEAST_CALLS]
    results += beginnings(_runs(calls, {n for r in results for layer in r.layers for n in layer}))
    place = {n: i for i, n in enumerate(calls)}
    return sorted(results, key=lambda r: place[r.layers[0][0]])


def _longest(calls: Sequence[fx.Node]) -> tuple[int, int, Repeat] | None:
    """The repetition that saves most calls, with its bounds in ``calls``."""
    numbers: dict[Any, int] = {}
    words = [numbers.setdefault(n if is_alone(n) else word(n), len(numbers)) for n in calls]
    for start, end, period in stretches(words):
        if (result := _divide(calls, start, end, period)) is not None:
            return result
    return None


def is_made_before(node: fx.Node) -> bool:
    """Whether a call makes a seed, or a tensor of a constant, which Inductor gives to no graph that is called."""
    lifts = node.target is torch.ops.aten.lift_fresh_copy.default and node.all_input_nodes[0].op == "get_attr"
    return lifts or inductor.is_seed(node)


def is_alone(node: fx.Node) -> bool:
    """Whether a call stays where it is, like none: it writes, draws from the generator, sends, or has a graph of its
    own."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is not operator.getitem
    talks = collectives.is_start(node) or collectives.is_wait(node) or collectives.is_blocking(node)
    draws = op_sets.draws(node) and not inductor.draws_by_seed(node)
    return talks or draws or op_sets.may_write(node.target)


def word(node: fx.Node) -> Any:
    """Equal for two calls of one operator with the same constants on values of the same sizes, types and layouts."""
    return node.target, str(fx.map_arg((node.args, node.kwargs), lambda n: "*")), value(node)


def value(node: fx.Node) -> str:
    """Sizes, strides, types, devices and alignment of what a node gives."""
    leaves = pytree.tree_leaves(fx_graph.example_value_of(node))
    return str([(*layout(x), x.device) if isinstance(x, torch.Tensor) else x for x in leaves])


def layout(x: torch.Tensor) -> tuple[Any, ...]:
    """What generated code knows of a tensor: kernels for a GPU read 16 bytes at once where memory begins there."""
    return x.shape, x.stride(), x.dtype, x.storage_offset() * x.dtype.itemsize % 16 == 0


def _periods(words: Sequence[int], least: int) -> list[int]:
    """Distances at which most calls have their like, the nearest or one of the next: layers of two kinds in turn are
    alike in most."""
    seen: dict[int, collections.deque[int]] = {}
    counts: collections.Counter[int] = collections.Counter()
    for i, word in enumerate(words):
        before = seen.setdefault(word, collections.deque(maxlen=RECENT))
        counts.update(i - k for k in before)
        before.append(i)
    return [distance for distance, _ in counts.most_common() if distance >= least][:CANDIDATES]


def stretches(words: Sequence[int], least: int = LEAST_CALLS) -> list[tuple[int, int, int]]:
    """(start, end, period) wherever ``least`` calls or more repeat :data:`LEAST_LAYERS` times, those that save most
    first."""
    every = [s for period in _periods(words, least) for s in _stretches_of(words, period)]
    return sorted(every, key=lambda s: -(s[1] - s[0] - s[2]))


def _stretches_of(words: Sequence[int], period: int) -> Iterable[tuple[int, int, int]]:
    start = 0
    for i in range(len(words) - period + 1):
        if i < len(words) - period and words[i] == words[i + period]:
            continue
        if i + period - start >= LEAST_LAYERS * period:
            yield start, i + period, period
        start = i + 1


def _divide(calls: Sequence[fx.Node], start: int, end: int, period: int) -> tuple[int, int, Repeat] | None:
    """The stretch as layers, beginning where least is lost."""
    depth = _depths(calls[start:end])
    middle = start + (end - start) // period // 2 * period
    lost = _losses(calls, range(max(start, middle - 2 * period), middle + period), 2 * period, depth)
    losses = []
    for shift in range(period):
        count = (end - start - shift) // period
        if count >= LEAST_LAYERS:
            unfused, through = lost[middle + shift]
            losses.append((unfused, -count, through, shift))
    for *_, shift in sorted(losses):
        first, last, layers = alike(calls, start + shift, end, period)
        if len(layers) >= LEAST_LAYERS:
            repeat = _repeat(layers)
            if _takes_tensors(repeat):
                return first, last, repeat
    return None


def _depths(calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """How many calls that generated code cannot fuse into lie before each, at most."""
    depth: dict[fx.Node, int] = {}
    for n in calls:
        before = max((depth.get(a, 0) for a in n.all_input_nodes), default=0)
        depth[n] = before + (not _fusible(n))
    return depth


def _fusible(node: fx.Node) -> bool:
    return storage.is_view(node) or partitioner.is_fusible(node)


def _losses(calls: Sequence[fx.Node], where: range, reach: int, depth: dict[fx.Node, int]) -> list[tuple[int, int]]:
    """Of each place a call may be cut from those before it, told by the calls of ``where`` at most ``reach`` before it:
    bytes of values that the cut keeps from being fused into what reads them, and how many values go through it."""
    place = {n: i for i, n in enumerate(calls)}
    lost, through = [0] * (len(calls) + 1), [0] * (len(calls) + 1)
    for i in where:
        node = calls[i]
        _add_span(through, i, max((place.get(u, -1) for u in node.users), default=-1), reach, 1)
        if _fusible(node) and not storage.is_view(node):
            readers = {u for v in storage.views_of(node) for u in v.users if not storage.is_view(u)}
            fused = [place.get(u, -1) for u in readers if _fusible(u) and depth.get(u) == depth[node]]
            _add_span(lost, i, max(fused, default=-1), reach, storage.storage_bytes(node.meta["val"]))
    return list(zip(itertools.accumulate(lost), itertools.accumulate(through)))


def _add_span(changes: list[int], first: int, last: int, reach: int, amount: int) -> None:
    """Note ``amount`` for each place behind call ``first`` up to call ``last``, of these the next ``reach``."""
    if last > first:
        changes[first + 1] += amount
        changes[min(last, first + reach) + 1] -= amount


def alike(calls: Sequence[fx.Node], start: int, end: int, period: int) -> tuple[int, int, list[tuple[fx.Node, ...]]]:
    """The most neighbours among the stretch's periods whose calls read one another at the same places."""
    best: tuple[int, int] = (0, 0)
    first, sign = start, None
    bounds = range(start, end - period + 1, period)
    for at in bounds:
        here = _wiring(calls[at : at + period])
        if here != sign:
            first, sign = at, here
        best = max(best, (at + period - first, -first))
    length, first = best[0], -best[1]
    layers = [tuple(calls[at : at + period]) for at in range(first, first + length, period)]
    return first, first + length, layers


def _wiring(layer: Sequence[fx.Node]) -> Any:
    """Of every argument of a layer's calls: the call of the layer that it is, or what another value is like."""
    place = {n: i for i, n in enumerate(layer)}
    return [[place.get(a, None if a in place else value(a)) for a in arguments(n)] for n in layer]


def arguments(node: fx.Node) -> list[fx.Node]:
    """In the order in which they are written, those written twice twice."""
    nodes: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: nodes.append(n) or n)
    return nodes


def _repeat(layers: list[tuple[fx.Node, ...]]) -> Repeat:
    inside = [set(layer) for layer in layers]
    slots: dict[tuple[fx.Node, ...], None] = {}
    for calls in zip(*layers):
        for read in zip(*map(arguments, calls)):
            if read[0] not in inside[0]:
                slots[read] = None
    outputs = set()
    for layer, own in zip(layers, inside):
        place = {n: i for i, n in enumerate(layer)}
        for node in layer:
            base = storage.owner(node)
            if base in own and any(u not in own for u in node.users):
                outputs.add(place[base])
    return Repeat(tuple(layers), tuple(zip(*slots)) if slots else ((),) * len(layers), tuple(sorted(outputs)))


# ------------------------------------------------------------ between collectives


def _runs(calls: Sequence[fx.Node], taken: set[fx.Node]) -> list[list[fx.Node]]:
    """Calls after one another of which none is alone or taken."""
    results: list[list[fx.Node]] = [[]]
    for n in calls:
        if is_alone(n) or n in taken:
            results.append([])
        elif results[-1] or not _is_part(n):
            results[-1].append(n)
    return results


def _is_part(node: fx.Node) -> bool:
    """Whether a call takes one of several results: of a call that is alone it stays outside."""
    return node.target is operator.getitem


def beginnings(runs: Sequence[Sequence[fx.Node]]) -> list[Repeat]:
    """What :data:`LEAST_LAYERS` runs or more begin with alike: that which saves most calls, then of what remains of
    these runs and of the others.

    Layers that talk to other ranks are divided by collectives, and what is scheduled between two of these, a weight's
    gradient say, is not the same in every layer.
    """
    numbers: dict[Any, int] = {}
    place = {n: i for i, n in enumerate(itertools.chain.from_iterable(runs))}
    words = {run: _words_in(run, numbers) for run in map(tuple, runs) if len(run) >= LEAST_CALLS}
    results = []
    while (length := _longest_beginning(list(words.values()))) is not None:
        number, first = length
        alike_runs = [run for run, row in words.items() if row[:number] == first]
        end = _end(alike_runs, number)
        alike_runs = sorted((run for run, row in words.items() if row[:end] == first[:end]), key=lambda r: place[r[0]])
        repeat = _repeat([run[:end] for run in alike_runs]) if end else None
        for run in alike_runs:
            del words[run]
            rest = run[end:]
            if end and len(rest) >= LEAST_CALLS:
                words[rest] = _words_in(rest, numbers)
        if repeat is not None and _takes_tensors(repeat):
            results.append(repeat)
    return results


def _words_in(run: Sequence[fx.Node], numbers: dict[Any, int]) -> tuple[int, ...]:
    """Of each call a number that tells it, with what it reads of the run and what else it reads is like."""
    wired = zip(map(word, run), map(str, _wiring(run)))
    return tuple(numbers.setdefault(w, len(numbers)) for w in wired)


def _longest_beginning(rows: Sequence[tuple[int, ...]]) -> tuple[int, tuple[int, ...]] | None:
    """How many words, and which, the rows begin with that save most calls."""
    best, ordered = (0, 0, 0), sorted(rows)
    common = [_common(one, other) for one, other in zip(ordered, ordered[1:])]
    for i in range(len(ordered)):
        length = len(ordered[i])
        for count, shared in enumerate(common[i:], 2):
            length = min(length, shared)
            if length < LEAST_CALLS:
                break
            if count >= LEAST_LAYERS:
                best = max(best, ((count - 1) * length, length, i))
    return (best[1], ordered[best[2]][: best[1]]) if best[0] else None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many words two rows begin with alike."""
    shortest = min(len(one), len(other))
    return next((k for k in range(shortest) if one[k] != other[k]), shortest)


def _end(runs: Sequence[tuple[fx.Node, ...]], length: int) -> int:
    """Where a beginning of ``length`` calls ends so that least is lost; 0 where that leaves too few."""
    if all(len(run) == length for run in runs):
        return length
    losses = []
    lost = [_losses(run, range(length), length, _depths(run)) for run in runs]
    for end in range(LEAST_CALLS, length + 1):
        if end == length or not _fusible(runs[0][end - 1]) or not _fusible(runs[0][end]):
            loss = max(row[end][0] for row in lost)
            losses.append((loss, -end))
    return -min(losses)[1]


def _takes_tensors(repeat: Repeat) -> bool:
    """Whether called graphs take, and return, tensors alone."""
    values = [repeat.layers[0][i] for i in repeat.outputs] + [n for inputs in repeat.inputs for n in inputs]
    return all(isinstance(n.meta.get("val"), torch.Tensor) for n in values)
