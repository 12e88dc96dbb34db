"""Save or recompute every value, at the least sum of the prices of both: one minimum cut, exactly solved.

Each operation is a vertex (sink side: the backward runs it again), each value another (sink side: the backward has it).
Cut edges are what is paid: into an operation the price of running it again, from an operation to its value the price of
saving. Values needed for a recomputation must be there too: an uncuttable edge. The construction is the one of Chen et al.
and of torch's partitioner, with finite prices where that has bans.
"""

from __future__ import annotations

import math
from typing import Callable

from mindspeed_fx import compat_partition
from mindspeed_fx.passes.recompute.tape import Operation, Tape, Value


def cheapest(tape: Tape, again: Callable[[Operation], float], save: Callable[[Value], float]) -> list[Value]:
    """The values to save.

    Args:
        again: price of running an operation once more; infinite where it must not be.
        save: price of keeping a value; infinite where it cannot be.
    """
    import networkx as nx

    graph = nx.DiGraph()
    for o in tape.operations:
        price = again(o)
        if compat_partition.must_recompute(o.node):
            graph.add_edge(o, "sink")
        elif price > 0:
            _add(graph, "source", o, price)
        for v in o.inputs:
            graph.add_edge(v, o)
    for v in tape.values:
        _add(graph, v.made_by, v, save(v) if v.savable else math.inf)
        if v.needed:
            graph.add_edge(v, "sink")
    if "source" not in graph or "sink" not in graph:
        return []
    _, (kept_apart, in_backward) = nx.minimum_cut(graph, "source", "sink")
    return [v for v in tape.values if v in in_backward and v.made_by in kept_apart]


def _add(graph, a, b, capacity: float) -> None:
    graph.add_edge(a, b) if capacity == math.inf else graph.add_edge(a, b, capacity=capacity)
