"""Until when what a graph holds is needed.

One walk (:class:`Walk`) says of every node which memories it reads and writes, also through views; the memory that an
asynchronous collective reads is read until its wait. :func:`lives` is that walk over the order a graph has; schedulers,
which choose the order, take the walk's reads and writes. :func:`curve` adds lives up, whosever they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Iterable

import torch.fx as fx

from mindspeed_fx.graph import op_sets
from mindspeed_fx.graph.annotate import written_nodes
from mindspeed_fx.graph.collectives import is_start, is_wait
from mindspeed_fx.graph.storage import Memories


def curve(length: int, lives: Iterable[tuple[int, int, int]]) -> list[int]:
    """Bytes alive while each of ``length`` steps runs, in time linear in steps and lives.

    Args:
        lives: (bytes, first step, last step) of every block of memory; it is alive at both ends.
    """
    change = [0] * (length + 1)
    for size, first, last in lives:
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change[:length]))


@dataclass
class Access:
    """What one node does to the memories of its graph."""

    reads: set[int]
    """Behind its arguments, those that it writes among them; of a wait also what its collective reads."""
    writes: set[int]
    """Changed in place."""


class Walk:
    """Follows a graph in order.

    Attributes:
        memories: of the nodes so far.
    """

    def __init__(self) -> None:
        self.memories = Memories()
        self._sent: dict[fx.Node, set[int]] = {}  # start -> memories that its transfer reads until it is waited for

    def visit(self, node: fx.Node) -> Access:
        """What the next node of the graph does."""
        reads = self.memories.behind(node.all_input_nodes)
        if is_wait(node):
            start = node.args[0]
            if not is_start(start):  # a result of one that has several, or what the graph is given
                start = next(iter(start.all_input_nodes), start)
            reads = reads | self._sent.get(start, set())
        writes = self.memories.behind(written_nodes(node))
        if node.op != "output":
            self.memories.add(node)
        if is_start(node):
            self._sent[node] = reads
        return Access(reads, writes)


@dataclass
class Lives:
    """From where to where the memories of a graph live."""

    nodes: list[fx.Node]
    """The graph's, without its output: positions count them."""
    memories: Memories
    first: list[int]
    """Of each memory, the position of what allocates it."""
    last: list[int]
    """Of each memory, the position of the last node that reads or writes it, or a view of it; the last position of all
    where the caller holds it: what the graph is given and what it returns.
    """

    def curve(self) -> list[int]:
        """Bytes alive while each node runs."""
        return curve(len(self.nodes), zip(self.memories.bytes, self.first, self.last))


def lives(graph: fx.Graph) -> Lives:
    """From where to where the memories of ``graph`` live, in the order that it has.

    Parameters and inputs live throughout: what a graph is given is held by its caller.
    """
    walk = Walk()
    first: list[int] = []
    last: list[int] = []
    nodes = [n for n in graph.nodes if n.op != "output"]
    memories = walk.memories
    for position, node in enumerate(nodes):
        access = walk.visit(node)
        new = len(memories.bytes) - len(first)
        first += [position] * new
        last += [position] * new
        for m in access.reads | memories.behind([node]):
            last[m] = position
    kept = memories.behind(graph.output_node().all_input_nodes)
    for m in range(len(last)):
        if m in kept or memories.is_given(m):
            last[m] = len(nodes) - 1
    return Lives(nodes, memories, first, last)


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose results somebody uses, or that change something; what a pass has replaced may still stand in the
    graph.
    """
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if (
            node.op == "output"
            or (node.op == "call_function" and op_sets.may_write(node.target))
            or not live.isdisjoint(node.users)
        ):
            live.add(node)
    return live
