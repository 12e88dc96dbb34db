"""``constrain(x, placements)``: a sharding constraint in a captured graph, and the graphs inside of checkpoint and wrap
nodes.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch
import torch.fx as fx

aten = torch.ops.aten


def constrain(x: torch.Tensor, placements: tuple[tuple[str, str], ...]) -> torch.Tensor:
    """``x`` at the given placements, pairs of mesh dimension and word; other mesh dimensions stay as they are."""
    if placements and hasattr(x, "device_mesh"):
        from mindspeed_fx.sharding.spmd.redistribute import redistribute

        return redistribute(x, dict(placements))
    return x


def operands(gm: fx.GraphModule, node: fx.Node) -> Iterator[tuple[fx.GraphModule, dict[fx.Node, Any]]]:
    """Graphs that a checkpoint or wrap node runs, each with what is given for its inputs."""
    graphs = [
        a
        for a in node.args
        if isinstance(a, fx.Node)
        and a.op == "get_attr"
        and isinstance(getattr(gm, str(a.target), None), fx.GraphModule)
    ]
    arguments = [a for a in node.args if a not in graphs]
    for graph in graphs:
        body = getattr(gm, str(graph.target))
        yield body, dict(zip([n for n in body.graph.nodes if n.op == "placeholder"], arguments))
