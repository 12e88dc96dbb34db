"""The part of an integer program that prices do not change: columns for choices and for values on their way, and the
rows that tie them.

Layouts in which every operator has the same choices share one :class:`Flows`: what is left for each is its costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mindspeed_fx.planning.search.highs import Linear
from mindspeed_fx.planning.search.problem import Edge, Node, Problem, Value
from mindspeed_fx.planning.search.sayable import is_sayable
from mindspeed_fx.planning.search.strategy_space import SUMMED, Label, P, R, Strategy

KINDS = ("", "all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(eq=False)
class Move:
    """A value and the readers that share its redistributions."""

    value: Value
    where: tuple
    readers: list[Edge]
    times: float = 0.0
    """How often in the model."""
    staged: bool = False
    """In layers, of which a pipeline stage has a share."""

    @property
    def layered(self) -> bool:
        return self.value.producer.run >= 0 and self.where[0] in ("inside", "between")


def moves(problem: Problem) -> list[Move]:
    """The values that go from one operator to others."""
    results: dict[tuple, Move] = {}
    for e in problem.edges:
        result = results.setdefault((e.value, e.where), Move(e.value, e.where, []))
        result.readers.append(e)
        run, more = e.count
        result.times, result.staged = (
            (float(max(0, len(problem.runs[run]) + more)), True) if run >= 0 else (float(more), False)
        )
    return list(results.values())


def kind(p: Label, t: Label) -> str:
    """The collective from placement ``p`` to ``t``; "" for none, "never" for what no plan does."""
    if p == t or p in (R, SUMMED):
        return "never" if t == P and p != P else ""
    if p == P:
        return "all_reduce" if t in (R, SUMMED) else "reduce_scatter"
    return "never" if t == P else "all_gather" if t in (R, SUMMED) else "all_to_all"


def there_and_back(move: Move, p: Label, t: Label) -> tuple[str, str]:
    """Collectives of a value and of its gradient."""
    return kind(p, t), kind({SUMMED: P}.get(t, t), {P: R}.get(p, p)) if move.value.floating else ""


class Pair(NamedTuple):
    """A column: ``move``'s value is made at ``p`` and moved to ``t``."""

    move: int
    p: Label
    t: Label
    column: int


class Flows:
    """Columns and rows of a program with these choices.

    Args:
        moves: of the problem, in their order.
        choices: strategies of each node.
    """

    def __init__(self, problem: Problem, moves: list[Move], choices: dict[Node, list[Strategy]]):
        self.problem, self.choices = problem, choices
        self.first: dict[Node, int] = {}
        """Column of each node's first choice."""
        self.pairs: list[Pair] = []
        self.columns = 0
        self.rows: tuple[list[int], list[int], list[float]] = ([], [], [])
        self.low: list[float] = []
        self.up: list[float] = []
        for n, mine in choices.items():
            self.first[n] = self.columns
            self.columns += len(mine)
            self._row(list(range(self.first[n], self.columns)), [1.0] * len(mine), 1, 1)
        self.choices_end = self.columns
        for i, move in enumerate(moves):
            self._move(i, move)
        self._tied()
        kinds = {k: i for i, k in enumerate(KINDS)}
        words = [there_and_back(moves[a.move], a.p, a.t) for a in self.pairs]
        self.forth, self.back = (np.array([kinds[w[i]] for w in words], dtype=int) for i in (0, 1))
        self.of, self.at = (
            np.array([x(a) for a in self.pairs], dtype=int) for x in (lambda a: a.move, lambda a: a.column)
        )
        self.layered = np.array([moves[a.move].layered for a in self.pairs], dtype=bool)
        self.times = np.array([moves[a.move].times for a in self.pairs])
        self.linear = Linear(self.rows, self.low, self.up, self.columns)
        """These rows alone."""

    def _row(self, columns: list[int], values: list[float], low: float, up: float) -> None:
        r, c, v = self.rows
        r.extend([len(self.low)] * len(columns))
        c.extend(columns)
        v.extend(values)
        self.low.append(low)
        self.up.append(up)

    def _column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def _move(self, number: int, move: Move) -> None:
        result = move.value.producer
        sources: dict[Label, list[int]] = {}
        for i, s in enumerate(self.choices[result]):
            sources.setdefault(s.outs[move.value.index], []).append(self.first[result] + i)
        targets = []
        for edge in move.readers:
            results: dict[Label, list[int]] = {}
            for i, s in enumerate(self.choices[edge.node]):
                results.setdefault(s.ins[edge.argument], []).append(self.first[edge.node] + i)
            targets.append(results)
        pairs = {}
        for p in sources:
            for t in dict.fromkeys(t for result in targets for t in result):
                if kind(p, t) != "never" and any(
                    is_sayable(move, p, t, e) for e, result in zip(move.readers, targets) if t in result
                ):
                    pairs[p, t] = self._column()
                    self.pairs.append(Pair(number, p, t, pairs[p, t]))
        for edge, results in zip(move.readers, targets):
            mine = {}
            for (p, t), y in pairs.items():
                if t not in results or not is_sayable(move, p, t, edge):
                    continue
                if len(targets) == 1:
                    mine[p, t] = y
                else:
                    mine[p, t] = self._column()
                    self._row([y, mine[p, t]], [1.0, -1.0], 0, np.inf)
            for p, columns in sources.items():  # a reader that p cannot reach forbids p
                self._row(
                    [c for (q, _), c in mine.items() if q == p] + columns,
                    [1.0] * sum(q == p for q, _ in mine) + [-1.0] * len(columns),
                    0,
                    0,
                )
            for t, columns in results.items():
                self._row(
                    [c for (_, u), c in mine.items() if u == t] + columns,
                    [1.0] * sum(u == t for _, u in mine) + [-1.0] * len(columns),
                    0,
                    0,
                )

    def _tied(self) -> None:
        """A parameter that two operators use is stored in one placement: the dimension that is divided must be one."""
        for parameter in self.problem.parameters:
            (a, i), *others = parameter.users
            for b, j in others:
                if a is b:
                    continue
                dims = {_dim(n, k, s) for n, k in ((a, i), (b, j)) for s in self.choices[n]}
                for d in dims:
                    mine = [self.first[a] + k for k, s in enumerate(self.choices[a]) if _dim(a, i, s) == d]
                    theirs = [self.first[b] + k for k, s in enumerate(self.choices[b]) if _dim(b, j, s) == d]
                    self._row(mine + theirs, [1.0] * len(mine) + [-1.0] * len(theirs), 0, 0)


def _dim(node: Node, i: int, s: Strategy) -> int | None:
    """The dimension of the parameter that is divided."""
    label = s.ins[i]
    return (
        next((d for d, atoms in enumerate(node.uses[i].value.dims) if label in atoms), None)
        if isinstance(label, int)
        else None
    )
