"""Joint graph -> forward and backward.

An operator that will be inlined anyway is inlined before the cut, so that whoever decides sees the pointwise work and
the reductions it is made of and can save or recompute each; an operator with a kernel of its own stays whole.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence

import torch.fx as fx

from mindspeed_fx.compat import inductor, partitioner
from mindspeed_fx.partition.max_flow import ENDLESS, SINK, SOURCE, Network
from mindspeed_fx.partition.shorten import Shortened
from mindspeed_fx.partition.unroll import unroll_both


class Partitioner(inductor.CustomPartitioner):
    """The partitioner that Inductor and AOTAutograd call.

    Args:
        prepare: called with the joint graph before it is cut.
        decide: called with the joint graph and torch's classification of its nodes; returns the nodes to save, or None
            to leave that to torch's min-cut.
        finish: called with the forward and the backward.
        memory_budget: fraction in (0, 1] of the activations' bytes to keep where torch decides; None: what pays.
        identity: what compile caches know this partitioner by.
        shortened: which layers the joint graph lacks; forward and backward get them when ``finish`` is done.
    """

    def __init__(
        self,
        prepare: Callable[[fx.GraphModule], None],
        decide: partitioner.Choose,
        finish: Callable[[fx.GraphModule, fx.GraphModule], None],
        memory_budget: float | int | str | None,
        identity: str,
        shortened: Shortened | None = None,
    ):
        self.prepare, self.decide, self.finish = prepare, decide, finish
        self.memory_budget, self.identity, self.shortened = memory_budget, identity, shortened

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.prepare(gm)
        forward, backward = partitioner.partition(
            gm,
            joint_inputs,
            self.decide,
            self.memory_budget if isinstance(self.memory_budget, float) else None,
            minimum_cut,
            **kwargs,
        )
        self.finish(forward, backward)
        if self.shortened is not None:
            inputs = joint_inputs[0]  # AOTAutograd compiles the forward with this list
            inputs[:] = unroll_both(forward, backward, self.shortened, inputs, kwargs["num_fwd_outputs"])
        return forward, backward

    def uuid(self) -> str:
        return self.identity

    def __reduce__(self) -> tuple:
        # Inductor's cache key pickles its configuration: only the identity may count.
        return (str, (self.identity,))


def minimum_cut(graph: Any, source: str, sink: str) -> tuple[int, tuple[set[str], set[str]]] | None:
    """``networkx.minimum_cut`` of torch's graph, in a tenth of its time and with the same result: where capacities are
    integers, the smallest sink side of a minimum cut does not depend on the algorithm.

    Args:
        graph: a ``networkx.DiGraph`` whose edges have a "capacity", infinite where they must not be cut.

    Returns:
        The capacity of the cut, and its two sides; None where a capacity is no integer, or no cut is finite, which
        networkx is left to say.
    """
    number = {name: 2 + i for i, name in enumerate(graph)} | {source: SOURCE, sink: SINK}
    network = Network(2 + len(number))
    for a, edges in graph.adjacency():
        for b, data in edges.items():
            capacity = data.get("capacity", math.inf)
            if capacity != math.inf and capacity != int(capacity):
                return None
            network.add(number[a], number[b], ENDLESS if capacity == math.inf else int(capacity))
    flow = network.solve()
    if flow >= ENDLESS:
        return None
    inside = network.sink_side()
    behind = {name for name, i in number.items() if inside[i]}
    return flow, (number.keys() - behind, behind)
