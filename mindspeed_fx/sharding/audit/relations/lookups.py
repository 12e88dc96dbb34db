"""Integers and truth values that ranks make of ids, one by one: what they are for every id there is.

A vocabulary in parts is read by "is this id among my rows, and which of them is it": comparisons, differences, choices,
all element by element. Such a value is a function of one id, and a vocabulary is finite, so that the function is
tabulated: one number for each id and each rank. What is shown of the tables holds for all ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils import _pytree as pytree

from mindspeed_fx.sharding.audit.relations.numbers import Numbers, Place
from mindspeed_fx.sharding.audit.relations.parts import Part, Terms, Unknown, regrouped

EACH = frozenset(
    "ge le lt gt eq ne add sub mul bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not where "
    "_to_copy clamp".split()
)
"""Element by element."""
VIEWS = frozenset("view _unsafe_view reshape unsqueeze squeeze clone detach alias contiguous".split())


@dataclass(frozen=True, eq=False)
class Lookup:
    """A value that is made of ids."""

    ids: Part
    """Of the shape of the value."""
    tables: tuple[Tensor, ...]
    """For each rank [ids there are]: the value for each of :func:`every_id`."""


@dataclass(frozen=True, eq=False)
class _Table:
    """Of one rank."""

    ids: Part
    values: Tensor


def every_id(terms: Terms, term: int) -> Tensor:
    """int64: all rows of the vocabulary that the ids of a term choose from, in order, then what is ignored."""
    count, ignored = terms.vocabularies[term]
    outside = sorted(i for i in ignored if not 0 <= i < count)
    return torch.cat([torch.arange(count), torch.tensor(outside, dtype=torch.int64)])


@dataclass
class Lookups:
    """Tables of what ranks compute."""

    terms: Terms
    numbers: Numbers
    own: Callable[[Any], Any]
    """Of a walk: pieces that each rank picked by its place as parts."""
    memo: dict[fx.Node, Any] = field(default_factory=dict)
    """Of one question: a vocabulary is large."""

    def of(self, nodes: Sequence[fx.Node]) -> Lookup:
        """For each rank.

        Raises:
            Unknown: the value is made of something else than one id for each element.
        """
        tables = []
        for place, node in zip(self.numbers.places, nodes):
            self.memo.clear()
            tables.append(self._read(place, node))
        self.memo.clear()
        if any(not isinstance(t, _Table) or t.ids != tables[0].ids for t in tables):
            raise Unknown("what is read follows from no ids, or from those of others")
        return Lookup(tables[0].ids, tuple(t.values for t in tables))

    def _read(self, place: Place, node: fx.Node) -> Any:
        if node not in self.memo:
            self.memo[node] = self._computed(place, node)
        return self.memo[node]

    def _computed(self, place: Place, node: fx.Node) -> Any:
        relation = self.own(self.numbers.values(node))
        if isinstance(relation, Part) and relation.term in self.terms.vocabularies:
            return _Table(relation, every_id(self.terms, relation.term))
        name, shape = getattr(node.target, "_opname", ""), _shape(node)
        if name in VIEWS:
            x = self._read(place, node.args[0])  # type: ignore[arg-type]
            return (
                _Table(regrouped(x.ids, shape, self.terms.known), x.values)
                if isinstance(x, _Table)
                else self._number(place, node)
            )
        if name not in EACH:
            return self._number(place, node)
        args = pytree.tree_map_only(fx.Node, lambda n: self._read(place, n), list(node.args))
        tables = [a for a in args if isinstance(a, _Table)]
        if not tables:
            return self._number(place, node)
        ids = tables[0].ids
        if any(t.ids != ids for t in tables) or ids.local != shape:
            raise Unknown("different ids meet")
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")}
        return _Table(ids, node.target(*(_plain(a) for a in args), **kwargs))  # type: ignore[operator]

    def _number(self, place: Place, node: fx.Node) -> Tensor:
        """What depends on no id."""
        return self.numbers.value(place, node)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("val"), "shape", ()))


def _plain(a: Any) -> Any:
    if isinstance(a, _Table):
        return a.values
    if isinstance(a, Tensor):
        if a.numel() != 1:
            raise Unknown("ids meet several numbers")
        return a.reshape(())
    return a
