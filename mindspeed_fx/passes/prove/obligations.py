"""What has to be equal for a rewritten graph to compute what the graph before it did.

A node that is in both graphs under its name, with the same operator and numbers, computes the same if what it reads
does. So one place is owed a proof for every argument that is another node after the pass than before: the two nodes
must have the same value, whatever the values of the nodes that both graphs have further up. That all of these hold is
that the graphs are equal.

Worked example: before, ``y = mul(x, r)`` and ``out = linear(y, w)``; after, ``y2 = rms_norm(x)[0]`` and
``out = linear(y2, w)``. ``out`` is in both, its first argument differs: owed is y == y2, read as functions of x.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from mindspeed_fx.compat import fake

MOST_STEPS = 400
"""Nodes of one side that are read; beyond it a place is left to the check of values."""


UNORDERED = (torch.ops.aten.histc.default,)
"""Functions of what they read in any order. A rewrite may let one read the same values in another: then it is itself
what is owed, for its argument is not the same."""

MOST_LIKELY = 4
"""Pairs of inner nodes that are tried for one place."""


class NotComparable(Exception):
    """Two graphs of which nodes cannot be told to belong together; the text says why."""


@dataclass
class Side:
    """One of the two values, and what it is computed of."""

    node: fx.Node
    inner: list[fx.Node] = field(default_factory=list)
    """Nodes that are read, in order of the graph."""
    leaves: dict[str, fx.Node] = field(default_factory=dict)
    """Nodes that stand for themselves, by the name that both sides have for them."""


@dataclass
class Obligation:
    """Two nodes that must have the same value."""

    before: Side
    after: Side


class Diff:
    """Which nodes two graphs share, and what is owed."""

    def __init__(self, before: fx.GraphModule, after: fx.GraphModule):
        _check_attributes(before, after)
        self.before = {n.name: n for n in before.graph.nodes}
        self.after = {n.name: n for n in after.graph.nodes}
        self.place = [{n: i for i, n in enumerate(gm.graph.nodes)} for gm in (before, after)]
        self.shared: set[str] = set()
        self.same: list[dict[str, str]] = [{}, {}]
        """Nodes of other names that are known to be equal: before -> after, and after -> before."""
        owed: dict[tuple[str, str], int] = {}
        for name, new in self.after.items():
            old = self.before.get(name)
            pairs = None if old is None or self._is_part_of_another(new) else _differing(old, new)
            if pairs and new.target in UNORDERED:
                pairs = None
            if pairs is None and new.op == "output":
                raise NotComparable("another number of results")
            if pairs is None:
                continue
            self.shared.add(name)
            for a, b in pairs:
                key = (a.name, b.name)
                owed[key] = min(owed.get(key, self.place[1][new]), self.place[1][new])
        self._check_effects()
        for name in self.shared:  # an argument of the same name that is another call now
            new = self.after[name]
            for b in new.all_input_nodes:
                if b.name in self.before and b.name not in self.shared:
                    key = (b.name, b.name)
                    owed[key] = min(owed.get(key, self.place[1][new]), self.place[1][new])
        self.owed = owed

    def _check_effects(self) -> None:
        """What is done beside results, and the inputs, must be there as before: no place is owed a proof for them."""
        for ours, kind in ((self.before, "before"), (self.after, "after")):
            for name, n in ours.items():
                if name not in self.shared and n.op == "call_function" and n.is_impure():
                    raise NotComparable(f"{name} has effects, and is only in the graph {kind}")
        inputs = [[n for n, node in ours.items() if node.op == "placeholder"] for ours in (self.before, self.after)]
        if inputs[0] != inputs[1]:
            raise NotComparable("other inputs")

    def _is_part_of_another(self, new: fx.Node) -> bool:
        """Whether a node takes a part of a call of several results that is another call than before: the parts are
        compared, not the call."""
        return new.target is operator.getitem and new.args[0].name not in self.shared

    def in_order(self) -> list[tuple[str, str]]:
        """What is owed, in order of the graph."""
        return sorted(self.owed, key=lambda pair: self.owed[pair])

    def obligation(self, a: str, b: str, opened: frozenset[str] = frozenset(), first: int | None = None) -> Obligation:
        """That ``a`` of before and ``b`` of after are equal, as they have to be before place ``first`` of after."""
        first = self.owed[a, b] if first is None else first
        return Obligation(self._read(self.before[a], 0, first, opened), self._read(self.after[b], 1, first, opened))

    def _read(self, node: fx.Node, side: int, first: int, opened: frozenset[str]) -> Side:
        result, pending, seen, leaves = Side(node), [node], {node}, []
        while pending:
            n = pending.pop()
            name = self._name_of_leaf(n, side, first)
            if n.op == "placeholder" or (n is not node and name is not None and name not in opened):
                leaves.append((self.place[side][n], name or n.name, n))
                continue
            result.inner.append(n)
            if len(result.inner) > MOST_STEPS:
                break
            for a in n.all_input_nodes:
                if a not in seen:
                    seen.add(a)
                    pending.append(a)
        result.inner.sort(key=self.place[side].__getitem__)
        result.leaves = {name: n for _, name, n in sorted(leaves, key=lambda leaf: leaf[0])}
        return result

    def _name_of_leaf(self, n: fx.Node, side: int, first: int) -> str | None:
        """The name under which a node may stand for itself, as both graphs have it before what is owed is read; None
        where it may not."""
        if not isinstance(n.meta.get("val"), torch.Tensor):
            return None
        other = self.same[side].get(n.name)
        after = n.name if other is None or side == 1 else other
        if (other is None and n.name not in self.shared) or self.place[1][self.after[after]] >= first:
            return None
        return other if side == 1 and other is not None else n.name

    def learn(self, a: str, b: str) -> None:
        """``a`` of before and ``b`` of after are equal."""
        self.same[0][a] = b
        self.same[1][b] = a

    def likely(self, obligation: Obligation) -> list[tuple[str, str]]:
        """Pairs of inner nodes of the two sides that may be equal, worth a try: another result of a fused call, and a
        node of before of its shape. Without these a sum that is passed on from layer to layer is read back to the
        first."""
        results = []
        for new in obligation.after.inner[:-1]:
            if new.target is operator.getitem and new.name not in self.same[1] and new.name not in self.shared:
                val = new.meta.get("val")
                for old in reversed(obligation.before.inner[:-1]):
                    if old.name not in self.same[0] and _layout(old) == _layout(new) and isinstance(val, torch.Tensor):
                        results.append((old.name, new.name))
        return results[:MOST_LIKELY]


def attribute_of(gm: fx.GraphModule, target: str) -> Any:
    """What a ``get_attr`` node of ``gm`` reads."""
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _check_attributes(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """A name of a constant must mean one tensor in both graphs: terms know it by its name."""
    targets = [{str(n.target) for n in gm.graph.nodes if n.op == "get_attr"} for gm in (before, after)]
    for target in sorted(targets[0] & targets[1]):
        a, b = attribute_of(before, target), attribute_of(after, target)
        if not isinstance(a, torch.Tensor) or a is b:
            continue
        if not isinstance(b, torch.Tensor) or fake.is_fake(a) or fake.is_fake(b) or not torch.equal(a, b):
            raise NotComparable(f"attribute {target} is not known to be the same tensor")


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
    sides = (obligation.before, obligation.after)
    a, b = ({name for name, n in side.leaves.items() if n.op != "placeholder"} for side in sides)
    return a ^ b


def last_shared(obligation: Obligation) -> str | None:
    """The leaf of both sides that is computed last; masks, which are seldom any values, before others."""
    other = obligation.after.leaves
    both = [name for name, n in obligation.before.leaves.items() if name in other and n.op == "call_function"]
    first = [name for name in both if getattr(other[name].meta.get("val"), "dtype", None) == torch.bool]
    return (first or both or [None])[-1]


def has_whole_numbers(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def signature(obligation: Obligation) -> str:
    """Equal for obligations that differ in names alone: layers of one kind."""
    numbers: dict[str, str] = {}
    lines = []
    for side in (obligation.before, obligation.after):
        own: dict[fx.Node, str] = {}
        for name, n in side.leaves.items():
            if name not in numbers:
                numbers[name] = f"%{len(numbers)}"
                lines.append(f"{numbers[name]}: {_layout(n)} {n.meta.get('needs_grad')}")
            own[n] = numbers[name]
        for i, n in enumerate(side.inner):
            own[n] = f"${i}"
            args = pytree.tree_map_only(fx.Node, lambda a: own.get(a, a.name), (n.args, n.kwargs))
            target = _attribute(n) if n.op == "get_attr" else n.target
            lines.append(f"{target}{args} {_layout(n)} {n.meta.get('grad_enabled')}")
        lines.append("==")
    return "\n".join(lines)


def _attribute(n: fx.Node) -> str:
    """A constant by its name, and by its number where it is one: proofs read that."""
    value = attribute_of(n.graph.owning_module, str(n.target))
    number = isinstance(value, torch.Tensor) and value.numel() == 1 and not fake.is_fake(value)
    return f"attribute {n.target}{f' = {value.item()}' if number else ''}"


def _layout(n: fx.Node) -> Any:
    val = n.meta.get("val")
    return [fake.layout_key(v)[:3] if isinstance(v, torch.Tensor) else v for v in pytree.tree_leaves(val)]
