"""Lower bounds of a layout's time and memory, from tables that many layouts share."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.schedules import idle_at_least
from mindspeed_fx.planning.search.solve import Allowed, Program
from mindspeed_fx.planning.search.stage_loads import AFTER, BEFORE, holders

Table = dict[int, list[float]]
"""Run, or end of the model, -> what its operators take at least, each in one layer."""


def batch_parts(layout: Layout) -> int:
    """Into how many parts replicas and microbatches cut the batch, beside ep."""
    return layout.dp * layout.microbatches


class LowerBounds:
    """Seconds and bytes that every choice of a layout needs."""

    def __init__(self, prices: Prices, memory: float, allowed: Allowed | None):
        self.prices, self.memory, self.allowed = prices, memory, allowed
        self.work: dict[tuple, dict[int, Table]] = {}
        """tp, ep, cp -> :func:`batch_parts` -> seconds."""
        self.store: dict[tuple, Table] = {}
        self.kept: dict[tuple, tuple[dict[int, float], float] | None] = {}
        self.cores: dict[tuple, dict[int, float]] = {}
        self.weights: dict[int, dict[int, float]] = {}

    def least_work(self, layout: Layout, core: float = 0.0, known: bool = False) -> float:
        """Seconds that compute and inner collectives take at least, from a table that many layouts share.

        Args:
            core: seconds of one microbatch in all layers at least, with the collectives between operators.
            known: a table of coarser microbatches will do, see :func:`_coarser`.
        """
        cut, tables = batch_parts(layout), self.work.setdefault((layout.tp, layout.ep, layout.cp), {})
        table, parts = _coarser(tables, cut) if known else (tables.get(cut), 1)
        if table is None:
            table, parts = tables.setdefault(cut, self._worked(layout)), 1
        full, weights = layout.recompute == "full", self._weights(layout.pp)
        again = full * sum(weights[r] * w[1] for r, w in table.items() if r >= 0) / parts
        forward = sum(weights[r] * w[1] for r, w in table.items()) / parts
        flat = max(sum(weights[r] * w[0] for r, w in table.items()) / parts, core / layout.pp) + again
        runs = self.prices.problem.runs if layout.pp > 1 else []
        longest = [-(-len(run) // layout.pp) * (table[r][0] + full * table[r][1]) / parts for r, run in enumerate(runs)]
        return layout.microbatches * max(flat, *longest, 0.0) + idle_at_least(layout, flat, forward)

    def _worked(self, layout: Layout) -> Table:
        p, choices = self.prices, self.prices.space.choices(layout, self.allowed)
        table = {run: [0.0, 0.0] for run in range(-1, len(p.problem.runs))}
        for n in p.problem.nodes:
            mine = [p.activations(n, s, layout) for s in choices[n]]
            table[n.run][0] += min((x.forward + x.backward + x.moved for x in mine), default=float("inf"))
            table[n.run][1] += min((x.forward for x in mine), default=0.0)
        return table

    def least_stored(self, layout: Layout) -> tuple[float, float]:
        """Seconds of the optimizer and bytes of states at least, of the mean rank."""
        weights = self._weights(layout.pp)
        rows = [(weights[part], w) for part, w in self._stored(layout).items()]
        return sum(w * x[0] for w, x in rows), sum(w * x[1] for w, x in rows)

    def least_memory(self, layout: Layout) -> float:
        """Bytes of states and of what is kept for the backward at least, of the fullest rank; 0 where an operator has
        no strategy."""
        stored, key = self._stored(layout), (layout.tp, layout.ep, layout.cp, batch_parts(layout), layout.recompute)
        if key not in self.kept:
            program = Program(self.prices, layout, self.memory, self.allowed)
            self.kept[key] = program.least_kept() if program.possible else None
        if (least := self.kept[key]) is None:
            return 0.0
        kept, transient = least
        held = max(
            sum(count * (stored[part][1] + microbatches * kept.get(part, 0.0)) for part, count in mine.items())
            for mine, microbatches in holders(layout, self.prices.order)
        )
        return held + (transient if layout.pp == 1 else 0.0)

    def _stored(self, layout: Layout) -> Table:
        p, key = (
            self.prices,
            (
                layout.tp,
                layout.ep,
                layout.dp * layout.cp,
                layout.ranks_per_node("data", self.prices.hw.node),
                layout.ranks_per_node("expert", self.prices.hw.node),
                layout.zero,
            ),
        )
        if key not in self.store:
            table = self.store[key] = {part: [0.0, 0.0] for part in self._weights(layout.pp)}
            choices = p.space.choices(layout, self.allowed)
            for n in (n for n in p.problem.nodes if p.stores[n.name]):
                mine = [p.stored(n, s, layout) for s in choices[n]]
                table[p.parts[n]][0] += min((x.update for x in mine), default=0.0)
                table[p.parts[n]][1] += min((x.state for x in mine), default=0.0)
        return self.store[key]

    def _weights(self, pp: int) -> dict[int, float]:
        """How often the mean of ``pp`` stages has the operators of each run, and of the ends of the model."""
        if pp not in self.weights:
            runs = self.prices.problem.runs
            self.weights[pp] = {BEFORE: 1.0 / pp, AFTER: 1.0 / pp, **{r: len(run) / pp for r, run in enumerate(runs)}}
        return self.weights[pp]

    def core(self, layout: Layout, known: bool = False) -> float:
        """See :meth:`Program.core`; ``known``: from coarser microbatches, 0 if there are none."""
        if layout.tp == 1:
            return 0.0
        cut, cores = batch_parts(layout), self.cores.setdefault((layout.tp, layout.ep, layout.cp), {})
        if known:
            core, parts = _coarser(cores, cut)
            return (core or 0.0) / parts
        if cut not in cores:
            program = Program(self.prices, layout, self.memory, self.allowed)
            cores[cut] = program.core() if program.possible else float("inf")
        return cores[cut]


def _coarser(known: dict[int, Any], cut: int) -> tuple[Any, int]:
    """The finest of ``known`` of which ``cut`` is a multiple, and the multiple; (None, 1) where there is none.

    An n-th of a microbatch takes at least an n-th of its time: launches and weights are the same, local sizes no
    smaller than an n-th, and no operator has more ways.
    """
    result = max((c for c in known if cut % c == 0), default=0)
    return (known[result], cut // result) if result else (None, 1)
