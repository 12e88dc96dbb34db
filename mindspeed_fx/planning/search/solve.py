"""The best choice for every operator in one layout: an integer program, its linear relaxation the bound.

Variables: x[n, s], operator n is computed by strategy s; y[v, p, t], value v is made at placement p and moved to t,
once for all its readers; r[v, reader, p, t], the same for one reader. Constraints:

    sum_s x[n, s] = 1
    sum_t r[v, c, p, t] = sum of x over the strategies of v's producer that make p
    sum_p r[v, c, p, t] = sum of x over the strategies of reader c that want t
    y >= r
    tied parameters are placed alike
    memory: states + kept activations * microbatches in flight + the largest operator's needs + gathered layers <= limit
    exposed >= gathers (reductions) - forward (backward) compute, for each kind of layer; exposed >= 0

and the objective is the modelled step time. Layers of a run share their variables. Solved by HiGHS through scipy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable

import numpy as np

from mindspeed_fx.planning.search.costs import NodePrice, Prices
from mindspeed_fx.planning.search.highs import Linear, milp
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.lp_structure import KINDS, Flows, Move, kind, moves, sayable, there_and_back
from mindspeed_fx.planning.search.problem import Edge, Node
from mindspeed_fx.planning.search.recomputation import Recomputation
from mindspeed_fx.planning.search.strategy_space import SUMMED, Label, R, Strategy

GiB = 2.0**30
"""Unit of memory in the program: HiGHS drops coefficients below 1e-9."""

Allowed = Callable[[Node, Strategy], bool]


class Unsayable(Exception):
    """A combination of choices in which a value cannot go where it is wanted; rounding can make one."""


@dataclass
class Solution:
    """A choice for every operator, and what it costs."""

    layout: Layout
    strategies: dict[Node, Strategy]
    prices: dict[Node, NodePrice]
    moves: list[tuple[Move, Label, Label, float, float]]
    """Value, placement made, placement wanted, seconds (once per microbatch and layer), bytes kept."""
    seconds: float
    bound: float
    """No choice in this layout is faster: the optimum of the linear relaxation."""
    memory: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of a step: compute, recompute, collectives, exposed, update, bubble."""
    bytes: dict[str, float] = field(default_factory=dict)
    """What :attr:`memory` is made of: states, kept, operator, gathered."""
    widest: Node | None = None
    """The operator that needs most at hand while it runs backward."""
    between: float = 0.0
    """Seconds of a step in which a rank waits for what its neighbours send, of one stage a rank."""
    schedule: str = "1F1B:1"
    """Of a pipeline: torch's name, and stages on a rank."""
    solved: float = 0.0
    """Seconds under 1F1B, of which :attr:`bound` speaks."""

    def __post_init__(self) -> None:
        self.solved = self.seconds

    @property
    def gap(self) -> float:
        return max(0.0, self.solved / self.bound - 1) if self.bound else 0.0


class Program:
    """The integer program of one layout."""

    def __init__(self, prices: Prices, layout: Layout, memory: float, allowed: Allowed | None = None):
        self.prices, self.layout, self.limit, self.problem = prices, layout, memory, prices.problem
        self.nodes = self.problem.nodes
        self.choices = prices.space.choices(layout, allowed)
        self.possible = all(self.choices.values())
        layers = sum(map(len, self.problem.runs))
        self.share = -(-layers // layout.pp) / layers if layers else 1.0
        self.turns = layout.microbatches + layout.pp - 1
        self.in_flight = min(layout.pp, layout.microbatches)
        self.recomputation = Recomputation(prices, layout)

    # ---------------------------------------------------------------- numbers

    def weight(self, run: int) -> float:
        """How often one stage has an operator of this run."""
        return len(self.problem.runs[run]) * self.share if run >= 0 else 1.0

    def priced(self) -> None:
        """Everything that is linear in the choices."""
        self.price = {
            (n, i): self.prices.price(n, s, self.layout) for n in self.nodes for i, s in enumerate(self.choices[n])
        }
        self._moved()

    def _moved(self) -> None:
        """What moves, how large it is and what a collective costs."""
        if self.prices.moves is None:
            self.prices.moves = moves(self.problem)
        self.moves = self.prices.moves
        ranks, near = self.layout.ranks_per_node("tp", self.prices.hw.node)
        self.lines = {
            k: self.prices.line(k, ranks, near) for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        } | {"": (0.0, 0.0)}
        self.bytes = {m.value: self.prices.space.nbytes(m.value, self.layout) for m in self.moves}

    @property
    def flows(self) -> Flows:
        """Rows and columns, shared by all layouts with these choices."""
        key = id(self.choices)  # which prices keep
        if key not in self.prices.flows:
            self.prices.flows[key] = Flows(self.problem, self.moves, self.choices)
        return self.prices.flows[key]

    def core(self) -> float:
        """Seconds of one microbatch in all layers, whatever is hidden, stored or recomputed: a bound for every layout
        with these parts of batch and sequence. Needs no :meth:`priced`."""
        self._moved()
        f, fixed, each = self.flows, *np.array([self.lines[k] for k in KINDS]).T
        cost = np.zeros(f.columns)
        for n in self.nodes:
            if n.run >= 0:
                cost[f.first[n] : f.first[n] + len(self.choices[n])] = [
                    self.weight(n.run) / self.share * (p.forward + p.backward + p.moved)
                    for p in (self.prices.activations(n, s, self.layout) for s in self.choices[n])
                ]
        nbytes = np.array([self.bytes[m.value] for m in self.moves])[f.of]
        cost[f.at] = (
            f.layered * f.times * (fixed[f.forth] + each[f.forth] * nbytes + fixed[f.back] + each[f.back] * nbytes)
        )
        result = f.linear.minimum(cost)
        return result[0] if result is not None else float("inf")

    def lower(self, core: float = 0.0) -> tuple[float, float]:
        """Seconds and bytes that every choice in this layout needs; ``core``: see :meth:`core`."""
        seconds, memory = self.between_stages() * self.turns / self.layout.microbatches, 0.0
        flat = again_at_least = 0.0
        hide = {n.run: [0.0, 0.0] for n in self.nodes}
        redo = 1.0 if self.layout.recompute == "full" else 0.0
        for n in self.nodes:
            w, mine = self.weight(n.run), [self.price[n, i] for i in range(len(self.choices[n]))]
            again = redo if n.run >= 0 else 0.0
            seconds += w * min(p.update for p in mine)
            flat += w * min(p.forward + p.backward + p.moved for p in mine)
            again_at_least += w * again * min(p.forward for p in mine)
            memory += w * min(p.state for p in mine)
            hide[n.run][0] += w * min(p.gather - p.forward for p in mine)
            hide[n.run][1] += w * min(p.reduce - p.backward for p in mine)
        seconds += self.turns * (max(flat, self.share * core) + again_at_least)
        memory += max(min(self.price[n, i].transient for i in range(len(self.choices[n]))) for n in self.nodes)
        for move in self.moves:
            n = self.bytes[move.value] / self.layout.tp
            kept = min(
                self.recomputation.keeps(move, R, SUMMED, 0.0, n)[0],
                self.recomputation.keeps(
                    move, move.value.dims[0][0] if move.value.dims and move.value.dims[0] else R, R, 0.0, n
                )[0],
            )
            memory += move.weight(self.share) * self.in_flight * min(n, kept)
        often = self.layout.microbatches if self.layout.zero == "zero3" else 1
        return seconds + often * sum(max(0.0, x) for pair in hide.values() for x in pair), memory

    def move_costs(self, move: Move, p: Label, t: Label, readers: list[Edge]) -> tuple[float, float, float] | None:
        """Seconds there, seconds back, bytes at ``t``; None for what no plan does."""
        n = self.bytes[move.value]
        forth = kind(p, t)
        if forth == "never" or not any(sayable(move, p, t, e) for e in readers):
            return None
        (a, b), (c, d) = (self.lines[k] for k in there_and_back(move, p, t))
        return a + b * n, c + d * n, n / (self.layout.tp if isinstance(t, int) else 1)

    # ---------------------------------------------------------------- the program

    def solve(self, integral: bool = False, seconds: float = 20.0) -> tuple[float, dict[Node, int]] | None:
        """Optimum of the relaxation, or of the program, and the (rounded) choice; None where nothing fits in memory."""
        c, rows, lower, upper, n, integrality, first = self._matrix()
        self.infeasible = False
        if integral:
            optimize, sparse = milp()
            matrix = sparse.csr_matrix((rows[2], (rows[0], rows[1])), shape=(len(lower), n))
            result = optimize.milp(
                c,
                constraints=optimize.LinearConstraint(matrix, lower, upper),
                bounds=optimize.Bounds(0, np.inf),
                integrality=integrality,
                options={"mip_rel_gap": 1e-4, "time_limit": seconds},
            )
            self.infeasible = result.status == 2
            if result.x is None:
                return None
            bound, x = float(result.fun if result.mip_dual_bound is None else result.mip_dual_bound), result.x
        else:
            relaxed = Linear(rows, lower, upper, n)
            if (optimum := relaxed.minimum(c)) is None:
                return None
            bound, x = optimum
            matrix = relaxed.matrix
        self.slack = float((matrix @ x)[-1]) < upper[-1] * (1 - 1e-6)
        chosen = {}
        for node in self.nodes:
            values = x[first[node] : first[node] + len(self.choices[node])]
            chosen[node] = int(np.argmax(values))
            self.fractional = self.fractional or float(values.max()) < 1 - 1e-6
        return bound + self.between_stages() * self.turns / self.layout.microbatches, chosen

    def least_memory(self) -> Solution | None:
        """The choice that needs the least memory, whatever it takes; None where rounding makes none."""
        self.limit = 1e30
        _, rows, lower, upper, n, _, first = self._matrix()
        cost = np.zeros(n)
        last = len(lower) - 1
        for r, column, value in zip(*rows):
            if r == last:
                cost[column] = value
        upper[last] = np.inf
        if (optimum := Linear(rows, lower, upper, n).minimum(cost)) is None:
            return None
        chosen = {
            node: int(np.argmax(optimum[1][first[node] : first[node] + len(self.choices[node])])) for node in self.nodes
        }
        try:
            return self.evaluate(chosen, 0.0)
        except Unsayable:
            return None

    def _matrix(self) -> tuple:
        L, f = self.layout, self.flows
        self.fractional, self.slack = False, False
        first = f.first
        cost: list[float] = [0.0] * f.columns
        rr, cc, vv = ([*x] for x in f.rows)
        low, up = [*f.low], [*f.up]

        def row(columns: list[int], values: list[float], lo: float, hi: float) -> None:
            rr.extend([len(low)] * len(columns))
            cc.extend(columns)
            vv.extend(values)
            low.append(lo)
            up.append(hi)

        memory_columns: list[int] = []
        memory_values: list[float] = []
        segments = sorted({n.run for n in self.nodes})
        hide: dict[int, tuple[list, list, list, list]] = {k: ([], [], [], []) for k in segments}
        for n in self.nodes:
            w, again = self.weight(n.run), self.recomputation.again(n)
            for i in range(len(self.choices[n])):
                p, column = self.price[n, i], first[n] + i
                cost[column] = w * (self.turns * (p.forward * (1 + again) + p.backward + p.moved) + p.update)
                memory_columns.append(column)
                memory_values.append(w * (p.state + self.in_flight * p.kept * (not again)))
                for k, value in enumerate((w * (p.forward - p.gather), w * (p.backward - p.reduce))):
                    hide[n.run][2 * k].append(column)
                    hide[n.run][2 * k + 1].append(value)
        for pair, k, j in zip(f.pairs, f.forth, f.back):
            move = self.moves[pair.move]
            n = self.bytes[move.value]
            (a, b), (c, d) = self.lines[KINDS[k]], self.lines[KINDS[j]]
            kept, redo = self.recomputation.keeps(
                move, pair.p, pair.t, a + b * n, n / (L.tp if isinstance(pair.t, int) else 1)
            )
            weight = move.weight(self.share)
            cost[pair.column] = weight * self.turns * (a + b * n + c + d * n + redo)
            if kept:
                memory_columns.append(pair.column)
                memory_values.append(weight * self.in_flight * kept)
        for run in segments:
            for k, once in ((0, L.zero != "zero3"), (1, L.zero != "zero3")):
                columns, values = hide[run][2 * k], hide[run][2 * k + 1]
                cost.append(1.0 if once else float(L.microbatches))
                row([*columns, len(cost) - 1], [*values, 1.0], 0, np.inf)
        largest = len(cost)
        cost.append(0.0)
        for n in self.nodes:
            size = len(self.choices[n])
            row(
                [*range(first[n], first[n] + size), largest],
                [-self.price[n, i].transient / GiB for i in range(size)] + [1.0],
                0,
                np.inf,
            )
        if L.zero == "zero3":
            whole = len(cost)
            cost.append(0.0)
            for run in segments:
                mine = [
                    (first[n] + i, -2 * self.price[n, i].gathered / GiB)
                    for n in self.nodes
                    if n.run == run
                    for i in range(len(self.choices[n]))
                    if self.price[n, i].gathered
                ]
                row([c for c, _ in mine] + [whole], [v for _, v in mine] + [1.0], 0, np.inf)
            memory_columns.append(whole)
            memory_values.append(GiB)
        memory_columns.append(largest)
        memory_values.append(GiB)
        row(memory_columns, [v / GiB for v in memory_values], -np.inf, self.limit / GiB)  # last: see slack
        integrality = np.zeros(len(cost))
        integrality[: f.choices_end] = 1
        return np.array(cost), (rr, cc, vv), np.array(low), np.array(up), len(cost), integrality, first

    # ---------------------------------------------------------------- what a choice costs

    def evaluate(self, chosen: dict[Node, int], bound: float) -> Solution:
        """The modelled step of one choice, added up by itself and not taken from the solver."""
        L, parts = (
            self.layout,
            dict.fromkeys(("compute", "recompute", "collectives", "exposed", "update", "bubble"), 0.0),
        )
        state = kept = 0.0
        widest = max(chosen, key=lambda n: self.price[n, chosen[n]].transient)
        gathered: dict[int, float] = {}
        hide = {n.run: [0.0, 0.0] for n in self.nodes}
        for n, i in chosen.items():
            p, w, again = self.price[n, i], self.weight(n.run), self.recomputation.again(n)
            parts["compute"] += w * L.microbatches * (p.forward + p.backward)
            parts["recompute"] += w * L.microbatches * p.forward * again
            parts["collectives"] += w * L.microbatches * p.moved
            parts["update"] += w * p.update
            state += w * p.state
            kept += w * p.kept * (not again)
            gathered[n.run] = gathered.get(n.run, 0.0) + 2 * p.gathered
            hide[n.run][0] += w * (p.gather - p.forward)
            hide[n.run][1] += w * (p.reduce - p.backward)
        strategies = {n: self.choices[n][i] for n, i in chosen.items()}
        moved = []
        for move in self.moves:
            p = strategies[move.value.producer].outs[move.value.index]
            for t in dict.fromkeys(strategies[e.node].ins[e.argument] for e in move.readers):
                costs = self.move_costs(move, p, t, move.readers)
                if costs is None:
                    raise Unsayable(f"{move.value.name} cannot go from {p} to {t}")
                forth, back, nbytes = costs
                bytes_kept, redo = self.recomputation.keeps(move, p, t, forth, nbytes)
                parts["collectives"] += move.weight(self.share) * L.microbatches * (forth + back)
                parts["recompute"] += move.weight(self.share) * L.microbatches * redo
                kept += move.weight(self.share) * bytes_kept
                moved.append((move, p, t, forth + back + redo, bytes_kept))
        between = self.between_stages()
        parts["collectives"] += between
        steady = parts["compute"] + parts["recompute"] + parts["collectives"]
        parts["bubble"] = steady * (L.pp - 1) / L.microbatches
        parts["exposed"] = sum(max(0.0, x) for pair in hide.values() for x in pair) * (
            L.microbatches if L.zero == "zero3" else 1
        )
        stored = {
            "states": state,
            "kept": self.in_flight * kept,
            "operator": self.price[widest, chosen[widest]].transient,
            "gathered": max(gathered.values()),
        }
        memory, seconds = sum(stored.values()), sum(parts.values())
        return Solution(
            L,
            strategies,
            {n: self.price[n, i] for n, i in chosen.items()},
            moved,
            seconds,
            bound,
            memory,
            parts,
            stored,
            widest,
            between,
        )

    def between_stages(self) -> float:
        """Seconds of a step in which a stage waits for its neighbours, without the bubble."""
        if self.layout.pp == 1:
            return 0.0
        n = max(
            (self.prices.space.nbytes(m.value, self.layout) for m in self.moves if m.where[0] == "between"), default=0.0
        )
        return 2 * self.layout.microbatches * self.prices.seconds("send_recv", n, self.layout, "pp")
