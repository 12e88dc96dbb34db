"""Which regions are cut in how many chunks: by trials of the whole graph, or, where it is large, of windows of it.

A large graph repeats its layers, and a trial of all of it takes seconds. So collectives that are alike (kind, group,
layouts, neighbours) are tried where they stand in the middle of the graph, in a graph of the nodes around, and what is
found best there is done to all of them if the step of the whole is shorter with it. How much is tried is a number of
nodes, so that every rank comes to the same.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.compat import fx_graph
from mindspeed_fx.graph.collectives import is_wait, kind
from mindspeed_fx.passes.overlap.chunking.chunk_search import GAIN, Trials, disjoint
from mindspeed_fx.passes.overlap.chunking.chunk_spec import Parts
from mindspeed_fx.passes.overlap.chunking.region import Region, regions
from mindspeed_fx.passes.overlap.model.simulator import memory_curve

LARGE = 3000
"""Nodes from which windows are tried: with these four numbers 40 658 nodes take 5.1 to 5.7 s in place of 34.9
(benchmarks/results/2026-11-22-overlap_time.txt, --ffn 4096).
"""
WIDTH = 400
"""Nodes of a window."""
MOST = 3
"""Windows of a graph: for the collectives that are exposed most, and those not in one of the windows before."""
TRIED = 10_000
"""Nodes that the graphs of all ways tried on one window may have together."""


@dataclass
class Found:
    """What trials came to."""

    regions: list[tuple[Region, Parts]]
    cuttable: set[fx.Node]
    """Collectives that were tried in chunks, or are like one that was."""
    untried: dict[fx.Node, str]
    """Collectives that were not, and why."""
    by_windows: bool = False
    """Collectives that are alike were decided together."""


def best(attempts: Trials, starts: Sequence[fx.Node], read: Callable[[fx.Node, str], list[Region]] = regions) -> Found:
    """The best way that is found to cut the regions of these collectives, which ``read`` reads."""
    if len(attempts.places) > LARGE:
        return _on_windows(attempts, starts)
    results = {reach: list(disjoint(starts, reach, read)) for reach in attempts.reaches}
    return Found(attempts.best(results), {s for rs in results.values() for r in rs for s in r.starts}, {})


def _on_windows(attempts: Trials, starts: Sequence[fx.Node]) -> Found:
    alike: dict[Any, list[fx.Node]] = {}
    like = {}
    for n in starts:
        like[n] = surroundings(n)
        alike.setdefault(like[n], []).append(n)
    exposed = Counter()
    for i, seconds in attempts.plain.exposed.items():
        if attempts.nodes[i] in like:
            exposed[like[attempts.nodes[i]]] += seconds
    curve, task = memory_curve(attempts.work, range(len(attempts.work))), {n: i for i, n in enumerate(attempts.nodes)}
    cuttable: set[Any] = set()
    seen: set[Any] = set()
    votes: dict[Any, Counter] = {}
    readings = 0
    for likeness, seconds in sorted(exposed.items(), key=lambda item: (-item[1], str(item[0])))[: 4 * MOST]:
        if likeness in seen or seconds < GAIN / 4 * attempts.plain.seconds or readings >= MOST:
            continue
        readings += 1
        nodes = _around(attempts, alike[likeness][len(alike[likeness]) // 2])
        gm, copies, owned = _graph_of(attempts, nodes)
        slack = attempts.limit - max(curve[task[n]] for n in nodes if n in task)
        part = Trials(gm, attempts.context, attempts.hardware, owned=owned.__contains__, allowance=slack, within=TRIED)
        inside = {copies[n]: like[n] for n in nodes if n in like and n in copies}
        seen |= set(inside.values())
        results = {reach: list(disjoint(list(inside), reach)) for reach in part.reaches}
        cuttable |= {inside[s] for rs in results.values() for r in rs for s in r.starts}
        chosen = {s: parts for region, parts in part.best(results) for s in region.starts}
        for s, likeness in inside.items():
            votes.setdefault(likeness, Counter())[chosen.get(s, 1)] += 1
        attempts.tried |= {(readings, *key): value for key, value in part.tried.items()}
    decided = {likeness: max(count, key=lambda p: (count[p], str(p))) for likeness, count in votes.items()}
    regions = _carry_chunks(
        [n for n in starts if decided.get(like[n], 1) != 1], {n: decided.get(like[n], 1) for n in starts}
    )
    seconds = attempts.way(regions) if regions else None
    if seconds is None or seconds > attempts.plain.seconds * (1 - GAIN):
        seconds, regions = attempts.plain.seconds, []
    few = (
        f"with all that is alike it is exposed for less than {GAIN / 4:.2%} of the step, and was tried on no window "
        "of the graph"
    )
    return Found(
        attempts.settled(seconds, regions),
        {n for n in starts if like[n] in cuttable},
        {n: few for n in starts if like[n] not in seen},
        True,
    )


def _carry_chunks(starts: Sequence[fx.Node], parts: dict[fx.Node, Parts]) -> list[tuple[Region, Parts]]:
    """Regions of the whole graph, each cut as most of its collectives are to be."""
    results = []
    for region in disjoint(starts, "pipeline"):
        count = Counter(parts.get(s, 1) for s in region.starts)
        most = max(count, key=lambda p: (count[p], str(p)))
        if most != 1 and region.most_parts((most,)):
            results.append((region, most))
    return results


def surroundings(start: fx.Node) -> Any:
    """Equal for collectives whose neighbours are of the same kinds and sizes, as those of repeated layers are."""
    value = lambda n: str(tuple(n.meta["val"].shape)) if isinstance(n.meta.get("val"), torch.Tensor) else ""
    after = sorted(str(u.target) for wait in start.users for u in wait.users)
    before = [(str(n.target) if n.op == "call_function" else n.op, value(n)) for n in start.all_input_nodes]
    return str((kind(start), start.args[1:], value(start), before, after))


def _around(attempts: Trials, middle: fx.Node) -> list[fx.Node]:
    nodes = list(attempts.places)
    first = max(min(attempts.places[middle] - WIDTH // 2, len(nodes) - WIDTH), 0)
    return [n for n in nodes[first : first + WIDTH] if n.op not in ("placeholder", "output", "get_attr")]


def _graph_of(
    attempts: Trials, nodes: Sequence[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node], set[fx.Node]]:
    """A graph of these nodes alone, in their order.

    Returns:
        It; the copy of each node (inputs from outside are placeholders); and the placeholders whose memory it may free.
    """
    inside, owner = set(nodes), attempts.owned or (lambda n: False)
    inside -= {
        n for n in nodes if is_wait(n) and not (isinstance(n.args[0], fx.Node) and n.args[0] in inside)
    }  # of a transfer that began before
    graph, root, copies, owned = fx.Graph(), torch.nn.Module(), {}, set()
    needed = dict.fromkeys(s for n in nodes if n in inside for s in n.all_input_nodes if s not in inside)
    for n in needed:
        if n.op == "get_attr":
            if "." not in n.target:
                setattr(root, n.target, getattr(attempts.gm, n.target))
            copies[n] = graph.node_copy(n)
        else:
            copies[n] = graph.placeholder(n.name)
            copies[n].meta = dict(n.meta)
            if all(u in inside for u in n.users) and (n.op != "placeholder" or owner(n)):
                owned.add(copies[n])
    for n in nodes:
        if n in inside:
            copies[n] = graph.node_copy(n, copies.__getitem__)
    graph.output(tuple(copies[n] for n in nodes if n in inside and any(u not in inside for u in n.users)))
    return fx_graph.lazy_graph(root, graph), copies, owned
