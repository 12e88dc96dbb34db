"""What has to be equal for a rewritten graph to compute what the graph before it did.

A node that is in both graphs under its name, with the same operator and numbers, computes the same if what it reads
does. So one place is owed a proof for every argument that is another node after the pass than before: the two nodes
must have the same value, whatever the values of the nodes that both graphs have further up. That all of these hold is
that the graphs are equal.

Worked example: before, ``y = mul(x, r)`` and ``out = linear(y, w)``; after, ``y2 = rms_norm(x)[0]`` and
``out = linear(y2, w)``. ``out`` is in both, its first argument differs: owed is y == y2, read as functions of x.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Iterator

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import fake

MOST_STEPS = 400
"""Nodes of one side that are read; beyond it a place is left to the check of values."""


class NotComparable(Exception):
    """Two graphs of which nodes cannot be told to belong together; the text says why."""


@dataclass
class Side:
    """One of the two values, and what it is computed of."""

    node: fx.Node
    inner: list[fx.Node] = field(default_factory=list)
    """Nodes that are read, in order of the graph."""
    leaves: list[fx.Node] = field(default_factory=list)
    """Nodes that stand for themselves."""


@dataclass
class Obligation:
    """Two nodes that must have the same value."""

    before: Side
    after: Side


class Diff:
    """Which nodes two graphs share, and what is owed."""

    def __init__(self, before: fx.GraphModule, after: fx.GraphModule):
        self.before = {n.name: n for n in before.graph.nodes}
        self.after = {n.name: n for n in after.graph.nodes}
        self.place = [{n: i for i, n in enumerate(gm.graph.nodes)} for gm in (before, after)]
        self.shared: set[str] = set()
        owed: dict[tuple[str, str], int] = {}
        for name, new in self.after.items():
            old = self.before.get(name)
            pairs = None if old is None else _differing(old, new)
            if pairs is None and new.op == "output":
                raise NotComparable("another number of results")
            if pairs is None:
                continue
            self.shared.add(name)
            for a, b in pairs:
                key = (a.name, b.name)
                owed[key] = min(owed.get(key, self.place[1][new]), self.place[1][new])
        for name in self.shared:  # an argument of the same name that is another call now
            new = self.after[name]
            for b in new.all_input_nodes:
                if b.name in self.before and b.name not in self.shared:
                    key = (b.name, b.name)
                    owed[key] = min(owed.get(key, self.place[1][new]), self.place[1][new])
        self.owed = owed

    def obligations(self, opened: frozenset[str] = frozenset()) -> Iterator[Obligation]:
        """What is owed, in order of the graph; nodes of ``opened`` do not stand for themselves."""
        for a, b in sorted(self.owed, key=lambda pair: self.owed[pair]):
            yield self.obligation(a, b, opened)

    def obligation(self, a: str, b: str, opened: frozenset[str] = frozenset()) -> Obligation:
        first = self.owed[a, b]
        return Obligation(self._read(self.before[a], 0, first, opened), self._read(self.after[b], 1, first, opened))

    def _read(self, node: fx.Node, side: int, first: int, opened: frozenset[str]) -> Side:
        result, pending, seen = Side(node), [node], {node}
        while pending:
            n = pending.pop()
            if n.op == "placeholder" or (n is not node and self._stands(n, first, opened)):
                result.leaves.append(n)
                continue
            result.inner.append(n)
            if len(result.inner) > MOST_STEPS:
                break
            for a in n.all_input_nodes:
                if a not in seen:
                    seen.add(a)
                    pending.append(a)
        result.inner.sort(key=self.place[side].__getitem__)
        result.leaves.sort(key=self.place[side].__getitem__)
        return result

    def _stands(self, n: fx.Node, first: int, opened: frozenset[str]) -> bool:
        """Whether a node may stand for itself: both graphs have it, before what is owed is read."""
        return (
            n.name in self.shared
            and n.name not in opened
            and self.place[1][self.after[n.name]] < first
            and isinstance(n.meta.get("val"), torch.Tensor)
        )


def _differing(old: fx.Node, new: fx.Node) -> list[tuple[fx.Node, fx.Node]] | None:
    """Pairs of arguments with different names of two nodes that are one call; None where they are not."""
    if old.op != new.op or old.target != new.target:
        return None
    if old.op == "placeholder":
        return []
    a, spec = pytree.tree_flatten((old.args, old.kwargs))
    b, other = pytree.tree_flatten((new.args, new.kwargs))
    if spec != other:
        return None
    pairs = []
    for x, y in zip(a, b):
        if isinstance(x, fx.Node) and isinstance(y, fx.Node):
            if x.name != y.name:
                pairs.append((x, y))
        elif isinstance(x, fx.Node) or isinstance(y, fx.Node) or str(x) != str(y):
            return None
    return pairs


def to_open(obligation: Obligation) -> set[str]:
    """Leaves that one side alone reads, which must be looked into."""
    a, b = ({n.name for n in side.leaves if n.op != "placeholder"} for side in (obligation.before, obligation.after))
    return a ^ b


def last_shared(obligation: Obligation) -> str | None:
    """The leaf of both sides that is computed last."""
    names = {n.name for n in obligation.after.leaves}
    both = [n for n in obligation.before.leaves if n.name in names and n.op == "call_function"]
    return both[-1].name if both else None


def signature(obligation: Obligation) -> str:
    """Equal for obligations that differ in names alone: layers of one kind."""
    numbers: dict[str, str] = {}
    lines = []
    for side in (obligation.before, obligation.after):
        own: dict[fx.Node, str] = {}
        for n in side.leaves:
            if n.name not in numbers:
                numbers[n.name] = f"%{len(numbers)}"
                lines.append(f"{numbers[n.name]}: {_layout(n)} {n.meta.get('needs_grad')}")
            own[n] = numbers[n.name]
        for i, n in enumerate(side.inner):
            own[n] = f"${i}"
            args = pytree.tree_map_only(fx.Node, lambda a: own.get(a, a.name), (n.args, n.kwargs))
            target = f"attribute {n.target}" if n.op == "get_attr" else n.target
            lines.append(f"{target}{args} {_layout(n)} {n.meta.get('grad_enabled')}")
        lines.append("==")
    return "\n".join(lines)


def _layout(n: fx.Node) -> Any:
    val = n.meta.get("val")
    return [fake.layout_key(v)[:3] if isinstance(v, torch.Tensor) else v for v in pytree.tree_leaves(val)]
