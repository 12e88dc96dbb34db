"""A backward in three graphs, so that a pipeline schedule can run each when it likes.

    made              = recompute(saved)               needs no gradient: may run in a bubble before one arrives
    gradients, left   = inputs(saved, made, tangents)  gradients of the stage's inputs: what the stage before waits for
    gradients         = weights(saved, made, left)     gradients of its weights: nobody waits for them

Together they are the backward's own calls, each once and in its order, so that every value is the same to the bit.
Views are not handed from one graph to the next but made where they are read. A call with several results belongs to the
earliest graph that needs one of them.
Zero bubble: Qi et al. 2023, arXiv 2401.10241. Recomputation in a bubble and delayed weights are MindSpeed's ripipe and
    nano-pipe.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

import torch
import torch.fx as fx

from mindspeed_fx.graph.storage import is_view


class SplitError(ValueError):
    """A backward that cannot be run in parts."""


@dataclass(frozen=True)
class Part:
    """One of the graphs."""

    gm: fx.GraphModule
    reads: tuple[str, ...]
    """What it is given, in order: names of nodes of the backward."""
    makes: tuple[str, ...]
    """What it returns, in order; "" for None."""


@dataclass(frozen=True)
class Parts:
    recompute: Part
    inputs: Part
    weights: Part


def split(backward: fx.GraphModule, weights: Iterable[int]) -> Parts:
    """The three graphs of a backward that AOTAutograd's partitioner made.

    Args:
        weights: positions, among what ``backward`` returns, of the gradients that may come later.

    Raises:
        SplitError: ``backward`` writes in place, so that its calls cannot be taken apart.
    """
    nodes = list(backward.graph.nodes)
    for n in nodes:
        if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable:
            raise SplitError(f"the backward cannot be split: {n.name} ({n.target}) writes in place")
    output = nodes[-1]
    returned, late = list(output.args[0]), set(weights)
    arguments = [n for n in nodes if n.op == "placeholder"]
    tangents = {n for n in arguments if "tangents" in str(n.target)}
    after = _after(nodes, tangents)
    result = {n for n in nodes if n not in after and n.op == "call_function" and _is_value(n)}

    first = [r for i, r in enumerate(returned) if i not in late]
    early = _before(first, nodes) & after
    early |= {n for n in nodes if n.target is operator.getitem and n.args[0] in early}
    done = {n for n in early if _is_value(n)}

    last = [r for i, r in enumerate(returned) if i in late]
    weights_part = _part(backward, last, {*arguments, *result, *done})
    remaining = [n for n in nodes if n.name in weights_part.reads and n in done and n not in first]
    inputs_part = _part(backward, [*first, *remaining], {*arguments, *result})
    again = [n for n in nodes if n in result and n.name in {*inputs_part.reads, *weights_part.reads}]
    return Parts(_part(backward, again, set(arguments)), inputs_part, weights_part)


def _is_value(node: fx.Node) -> bool:
    """True for what can be handed on: no view, and no bundle of results."""
    return not is_view(node) and not isinstance(node.meta.get("val"), (tuple, list))


def _after(nodes: Sequence[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    """``first`` and all that is computed from it."""
    results = set(first)
    for n in nodes:
        if n.op != "output" and any(a in results for a in n.all_input_nodes):
            results.add(n)
    return results


def _before(last: Iterable[Any], nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """``last`` and all that it is computed from."""
    results = {n for n in last if isinstance(n, fx.Node)}
    for n in reversed(nodes):
        if n in results:
            results.update(n.all_input_nodes)
    return results


def _part(gm: fx.GraphModule, wanted: Sequence[Any], arg: set[fx.Node]) -> Part:
    """The graph that computes ``wanted`` from what it needs of ``arg``."""
    needed: set[fx.Node] = set()
    todo = [n for n in wanted if isinstance(n, fx.Node)]
    while todo:
        n = todo.pop()
        if n not in needed:
            needed.add(n)
            todo += [] if n in arg else n.all_input_nodes
    graph, copy = fx.Graph(), {}
    order = [n for n in gm.graph.nodes if n in needed]
    reads = [n for n in order if n in arg]
    for n in reads:
        copy[n] = graph.placeholder(n.name)
    for n in order:
        if n not in arg:
            copy[n] = graph.node_copy(n, copy.__getitem__)
    for n, new in copy.items():
        new.meta = dict(n.meta)
    graph.output([copy[n] if isinstance(n, fx.Node) else n for n in wanted])
    graph.lint()
    return Part(
        fx.GraphModule(gm, graph),
        tuple(n.name for n in reads),
        tuple(n.name if isinstance(n, fx.Node) else "" for n in wanted),
    )
