"""Bytes that a graph keeps alive, from its fake values: allocations alone, in the order of the graph, views shared."""

from __future__ import annotations

from typing import Any, Iterable

import torch.fx as fx

from mindspeed_fx.graph.liveness import lives
from mindspeed_fx.graph.storage import Memories


def peak(gm: fx.GraphModule) -> dict[str, Any]:
    """``inputs``, ``outputs`` and the ``peak`` of bytes alive while the graph runs, with the ``node`` where it is
    reached.

    Inputs live throughout: parameters do, and what a backward is given is held by its caller. A value dies after its
    last use; workspaces within an operator and the allocator's rounding are not counted.
    """
    result = lives(gm.graph)
    alive = result.curve()
    best = max(alive, default=0)
    where = result.nodes[alive.index(best)].name if best else ""
    return {
        "inputs": _total(result.memories, (n for n in result.nodes if n.op == "placeholder")),
        "outputs": _total(result.memories, gm.graph.output_node().all_input_nodes),
        "peak": best,
        "node": where,
    }


def allocated_bytes(gm: fx.GraphModule) -> dict[fx.Node, int]:
    """Bytes that each call allocates for its results: views and results written to inputs take none."""
    memories = Memories(gm.graph)
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    return {n: sum(memories.bytes[m] for m in memories.made_by(n)) for n in calls}


def saved_bytes(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Bytes that ``backward`` is given of what ``forward`` made: the activations kept between the two."""
    memories = Memories(forward.graph)
    names = {n.name for n in backward.graph.nodes if n.op == "placeholder"}
    arg = memories.behind(n for n in forward.graph.nodes if n.op == "placeholder")
    kept = memories.behind(n for n in forward.graph.output_node().all_input_nodes if n.name in names)
    return sum(memories.bytes[m] for m in kept - arg)


def _total(memories: Memories, nodes: Iterable[fx.Node]) -> int:
    return sum(memories.bytes[m] for m in memories.behind(nodes))
