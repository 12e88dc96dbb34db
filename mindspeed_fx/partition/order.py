"""What only prepares the backward runs where its inputs are made.

A gradient that is written out, such as that of a GELU, is computed from activations alone at first. AOTAutograd has
these operations where the backward needs them; a plan that saves their result makes the forward run them, and torch's
partitioner keeps the order of the joint graph: at the end of the forward, with their inputs alive until then, for all
layers. Right behind their last input they need little room. What is not saved runs in the backward, as before.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from mindspeed_fx.compat import partitioner


def prepare_early(graph: fx.Graph, info: Any) -> int:
    """Moves operations of the forward that only the backward reads behind the last of their inputs; returns how many.

    Draws of random numbers and whatever is not pure stay where they are. The graph's values do not change.
    """
    backward = partitioner.backward_nodes(info)
    place = {n: i for i, n in enumerate(graph.nodes)}
    turn = next((n for n in graph.nodes if n in backward and n.op == "call_function"), None)
    if turn is None:
        return 0
    moved, behind = 0, {}
    for node in list(graph.nodes):
        if place[node] < place[turn] or node in backward or node.op != "call_function":
            continue
        if not partitioner.is_pure(node) or partitioner.is_random(node) or partitioner.must_save(node):
            continue
        sources = node.all_input_nodes
        if not sources or any(place[a] > place[turn] and a not in behind for a in sources):
            continue
        last = max(sources, key=lambda a: behind.get(a, (place[a], 0)))
        if last.op in ("placeholder", "get_attr"):
            continue  # views of parameters cost nothing where they are
        behind[node] = (behind.get(last, (place[last], 0))[0], place[node])
        moved += 1
    alap: dict[int, fx.Node] = {}
    nodes = list(place)
    for node, (at, _) in sorted(behind.items(), key=lambda e: e[1]):
        alap.get(at, nodes[at]).append(node)
        alap[at] = node
    return moved
