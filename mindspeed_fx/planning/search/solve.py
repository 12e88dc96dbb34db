"""The best choice for every operator in one layout: an integer program, its linear relaxation the bound.

Variables: x[n, s], operator n is computed by strategy s; y[v, p, t], value v is made at placement p and moved to t,
once for all its readers; r[v, reader, p, t], the same for one reader. Constraints:

    sum_s x[n, s] = 1
    sum_t r[v, c, p, t] = sum of x over the strategies of v's producer that make p
    sum_p r[v, c, p, t] = sum of x over the strategies of reader c that want t
    y >= r
    tied parameters are placed alike
    memory, of each rank that may be the fullest: states + kept activations * microbatches in flight + the largest
    operator's needs + gathered layers <= limit
    exposed >= gathers (reductions) - forward (backward) compute, for each kind of layer; exposed >= 0
    of a pipeline: fullest >= a microbatch's seconds on the mean rank, on a rank with as many layers of one run as some
    rank must have, on one with an end of the model and a layer

and the objective is the modelled step time, which of a pipeline is the least over all ways to deal layers to stages
(``stage_step.py`` prices one of them). Layers of a run share their variables. Solved by HiGHS through scipy.
"""

from __future__ import annotations

from typing import Callable

import numpy as np

from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.highs import Linear, milp
from mindspeed_fx.planning.search.layouts import Layout
from mindspeed_fx.planning.search.lp_structure import KINDS, Flows, Move, kind, moves, there_and_back
from mindspeed_fx.planning.search.problem import Edge, Node
from mindspeed_fx.planning.search.recomputation import Recomputation
from mindspeed_fx.planning.search.sayable import is_sayable
from mindspeed_fx.planning.search.schedules import idle_at_least, idle_times
from mindspeed_fx.planning.search.solution import Solution, Unsayable
from mindspeed_fx.planning.search.stage_loads import AFTER, BEFORE, holders
from mindspeed_fx.planning.search.stage_step import evaluate
from mindspeed_fx.planning.search.strategy_space import Label, Strategy

GiB = 2.0**30
"""Unit of memory in the program: HiGHS drops coefficients below 1e-9."""

Allowed = Callable[[Node, Strategy], bool]


class Program:
    """The integer program of one layout."""

    def __init__(self, prices: Prices, layout: Layout, memory: float, allowed: Allowed | None = None):
        self.prices, self.layout, self.limit, self.problem = prices, layout, memory, prices.problem
        self.nodes = self.problem.nodes
        self.choices = prices.space.choices(layout, allowed)
        self.possible = all(self.choices.values())
        self.part, self.order = prices.parts, prices.order
        self.waits = idle_times(layout)
        self.holders = holders(layout, self.order)
        """Ranks that may be the fullest: how many they have of each part of the model, and microbatches kept."""
        self.recomputation = Recomputation(prices, layout)

    # ---------------------------------------------------------------- numbers

    def weight(self, run: int) -> float:
        """How often the mean rank has an operator of this run."""
        return (len(self.problem.runs[run]) if run >= 0 else 1.0) / self.layout.pp

    def part_of(self, move: Move) -> tuple[int, float]:
        """The part of the model that a move is in, and how often there."""
        run = move.value.producer.run
        if run < 0:
            return self.part[move.value.producer], move.times
        if not move.staged:
            run = next((e.node.run for e in move.readers if e.node.run >= 0), -1)
            if run < 0:
                return self.part[move.readers[0].node], move.times
        return run, move.times / len(self.problem.runs[run])

    def priced(self, like: Program | None = None) -> None:
        """Everything that is linear in the choices.

        Args:
            like: a program of the same layout under another schedule, whose prices are these.
        """
        if like is not None:
            self.price, self.moves, self.lines, self.bytes = like.price, like.moves, like.lines, like.bytes
            return
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
        fixed, each = self.lines["all_to_all"]
        self.lines["all_to_all"] = fixed, each / ranks  # of a rank's part, as the others of the value below
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
                    len(self.problem.runs[n.run]) * (p.forward + p.backward + p.moved)
                    for p in (self.prices.activations(n, s, self.layout) for s in self.choices[n])
                ]
        nbytes = np.array([self.bytes[m.value] for m in self.moves])[f.of]
        cost[f.at] = (
            f.layered * f.times * (fixed[f.forth] + each[f.forth] * nbytes + fixed[f.back] + each[f.back] * nbytes)
        )
        result = f.linear.minimum(cost)
        return result[0] if result is not None else float("inf")

    def least_kept(self) -> tuple[dict[int, float], float]:
        """Bytes that one layer of each run and the ends of the model keep of one microbatch for the backward, and those
        at hand at once, at least: for every layout with these parts of batch and sequence and this recompute. Needs no
        :meth:`priced`."""
        self._moved()
        f, costs = self.flows, {part: np.zeros(self.flows.columns) for part in self.part.values()}
        transient = 0.0
        for n in self.nodes:
            sizes = [self.prices.sizes(n, s, self.layout) for s in self.choices[n]]
            transient = max(transient, min(x[1] for x in sizes))
            if not self.recomputation.again(n):
                costs[self.part[n]][f.first[n] : f.first[n] + len(sizes)] = [x[0] for x in sizes]
        parts = [self.part_of(move) for move in self.moves]
        for pair in f.pairs:
            move, (part, times) = self.moves[pair.move], parts[pair.move]
            n = self.bytes[move.value] / (self.layout.tp if isinstance(pair.t, int) else 1)
            costs[part][pair.column] = times * self.recomputation.keeps(move, pair.p, pair.t, 0.0, n)[0]
        results = {part: self._least(cost, together=part >= 0) for part, cost in costs.items()}
        return results, transient

    def _least(self, cost: np.ndarray, together: bool) -> float:
        """The least sum of what is chosen, in bytes; without ``together``, of each operator and move by itself."""
        f = self.flows
        if together:
            least = f.linear.minimum(cost / GiB)
            return least[0] * GiB if least is not None else float("inf")
        ends = [f.first[n] + len(self.choices[n]) for n in self.nodes]
        chosen = sum(cost[f.first[n] : end].min() for n, end in zip(self.nodes, ends))
        moved = np.full(len(self.moves), np.inf)
        np.minimum.at(moved, f.of, cost[f.at])
        return float(chosen + moved[np.isfinite(moved)].sum())

    def lower(self, core: float = 0.0) -> float:
        """Seconds that every choice in this layout needs; ``core``: see :meth:`core`."""
        L, flat, again_at_least, forward = self.layout, 0.0, 0.0, 0.0
        seconds, hide = self.between_stages(), {part: [0.0, 0.0] for part in self.part.values()}
        redo = 1.0 if L.recompute == "full" else 0.0
        for n in self.nodes:
            w, mine = self.weight(n.run), [self.price[n, i] for i in range(len(self.choices[n]))]
            least = min(p.forward for p in mine)
            seconds += w * min(p.update for p in mine)
            flat += w * min(p.forward + p.backward + p.moved for p in mine)
            forward += w * least
            again_at_least += w * least * (redo if n.run >= 0 else 0.0)
            hide[self.part[n]][0] += w * min(p.gather - p.forward for p in mine)
            hide[self.part[n]][1] += w * min(p.reduce - p.backward for p in mine)
        steady = max(flat, core / L.pp) + again_at_least
        seconds += L.microbatches * steady + idle_at_least(L, steady, forward)
        often = L.microbatches if L.zero == "zero3" else 1
        return seconds + often * sum(max(0.0, x) for pair in hide.values() for x in pair)

    def move_costs(self, move: Move, p: Label, t: Label, readers: list[Edge]) -> tuple[float, float, float] | None:
        """Seconds there, seconds back, bytes at ``t``; None for what no plan does."""
        n = self.bytes[move.value]
        forth = kind(p, t)
        if forth == "never" or not any(is_sayable(move, p, t, e) for e in readers):
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
        limits = len(self.holders)
        self.slack = bool(((matrix @ x)[-limits:] < upper[-limits:] * (1 - 1e-6)).all())
        chosen = {}
        for node in self.nodes:
            values = x[first[node] : first[node] + len(self.choices[node])]
            chosen[node] = int(np.argmax(values))
            self.fractional = self.fractional or float(values.max()) < 1 - 1e-6
        return bound + self.between_stages(), chosen

    def least_memory(self) -> Solution | None:
        """The choice that needs the least memory, whatever it takes; None where rounding makes none."""
        self.limit = 1e30
        _, rows, lower, upper, n, _, first = self._matrix()
        cost = np.zeros(n)
        limits = len(lower) - len(self.holders)
        for r, column, value in zip(*rows):
            if r == limits:
                cost[column] = value
        upper[limits:] = np.inf
        if (optimum := Linear(rows, lower, upper, n).minimum(cost)) is None:
            return None
        chosen = {
            node: int(np.argmax(optimum[1][first[node] : first[node] + len(self.choices[node])])) for node in self.nodes
        }
        try:
            return self.evaluate(chosen, 0.0)
        except Unsayable:
            return None

    def evaluate(self, chosen: dict[Node, int], bound: float) -> Solution:
        """The modelled step of one choice."""
        return evaluate(self, chosen, bound)

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

        limits: list[tuple[list[int], list[float]]] = [([], []) for _ in self.holders]
        work: dict[int, tuple[list[int], list[float]]] = {}
        """Of each part of the model: columns, and their seconds of one microbatch in one of its layers."""
        waits, m = self.waits, L.microbatches
        segments = sorted(set(self.part.values()))
        hide: dict[int, tuple[list, list, list, list]] = {k: ([], [], [], []) for k in segments}

        def enter(column: int, part: int, times: float, seconds: float, idle: float, state: float, kept: float) -> None:
            """A choice in each layer of a part."""
            w = times * self.weight(max(part, -1))
            cost[column] = w * (idle if L.pp > 1 else m * seconds)
            mine = work.setdefault(part, ([], []))
            mine[0].append(column)
            mine[1].append(times * seconds)
            for (counts, held), (columns, values) in zip(self.holders, limits):
                if (nbytes := counts.get(part, 0) * times * (state + held * kept)) > 0:
                    columns.append(column)
                    values.append(nbytes / GiB)

        for n in self.nodes:
            w, again = self.weight(n.run), self.recomputation.again(n)
            for i in range(len(self.choices[n])):
                p, column = self.price[n, i], first[n] + i
                idle = (
                    waits[0] * (p.forward + p.moved / 2)
                    + waits[1] * (p.backward - p.weights + p.moved / 2 + p.forward * again)
                    + waits[2] * p.weights
                )
                seconds = p.forward * (1 + again) + p.backward + p.moved
                enter(column, self.part[n], 1.0, seconds, idle, p.state, p.kept * (not again))
                cost[column] += w * p.update
                for k, value in enumerate((w * (p.forward - p.gather), w * (p.backward - p.reduce))):
                    hide[self.part[n]][2 * k].append(column)
                    hide[self.part[n]][2 * k + 1].append(value)
        for pair, k, j in zip(f.pairs, f.forth, f.back):
            move = self.moves[pair.move]
            n = self.bytes[move.value]
            (a, b), (c, d) = self.lines[KINDS[k]], self.lines[KINDS[j]]
            kept, redo = self.recomputation.keeps(
                move, pair.p, pair.t, a + b * n, n / (L.tp if isinstance(pair.t, int) else 1)
            )
            moved = a + b * n + c + d * n
            idle = waits[0] * moved / 2 + waits[1] * (moved / 2 + redo)
            enter(pair.column, *self.part_of(move), moved + redo, idle, 0.0, kept)
        for part in segments:
            for k, once in ((0, L.zero != "zero3"), (1, L.zero != "zero3")):
                columns, values = hide[part][2 * k], hide[part][2 * k + 1]
                cost.append(1.0 if once else float(L.microbatches))
                row([*columns, len(cost) - 1], [*values, 1.0], 0, np.inf)
        if L.pp > 1:
            self._fullest(cost, work, row)
        self._memory(cost, limits, row)
        integrality = np.zeros(len(cost))
        integrality[: f.choices_end] = 1
        return np.array(cost), (rr, cc, vv), np.array(low), np.array(up), len(cost), integrality, first

    def _fullest(self, cost: list[float], work: dict[int, tuple[list[int], list[float]]], row: Callable) -> None:
        """A column for the seconds of a microbatch on the fullest rank, and rows that keep it above what some rank must
        have however layers are dealt.
        """
        runs, pp, fullest = self.problem.runs, self.layout.pp, len(cost)
        cost.append(float(self.layout.microbatches))
        least = [{part: self.weight(max(part, -1)) for part in work}]
        least += [{run: float(-(-len(mine) // pp))} for run, mine in enumerate(runs) if len(mine) >= pp]
        least += [{end: 1.0, run: 1.0} for end, run in ((BEFORE, self.order[0]), (AFTER, self.order[-1]))]
        for counts in least:
            columns = [c for part in counts for c in work.get(part, ((), ()))[0]]
            values = [-n * v for part, n in counts.items() for v in work.get(part, ((), ()))[1]]
            row([*columns, fullest], [*values, 1.0], 0, np.inf)

    def between_stages(self) -> float:
        """Seconds of a step in which a rank waits for its neighbours, without the bubble."""
        if self.layout.pp == 1:
            return 0.0
        n = max(
            (self.prices.space.nbytes(m.value, self.layout) for m in self.moves if m.where[0] == "between"), default=0.0
        )
        each = self.prices.seconds("send_recv", n, self.layout, "pp")
        return 2 * self.layout.microbatches * self.layout.virtual * each

    def _memory(self, cost: list[float], limits: list[tuple[list[int], list[float]]], row: Callable) -> None:
        """Columns for what is at hand at once, and the rows of memory, one for each of :attr:`holders`, last.

        Args:
            limits: of each row, columns and GiB.
        """
        first = self.flows.first
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
        needs = [largest]
        if self.layout.zero == "zero3":
            whole = len(cost)
            cost.append(0.0)
            for part in sorted(set(self.part.values())):
                mine = [
                    (first[n] + i, -2 * self.price[n, i].gathered / GiB)
                    for n in self.nodes
                    if self.part[n] == part
                    for i in range(len(self.choices[n]))
                    if self.price[n, i].gathered
                ]
                row([c for c, _ in mine] + [whole], [v for _, v in mine] + [1.0], 0, np.inf)
            needs.append(whole)
        for columns, values in limits:  # last: see slack
            row([*columns, *needs], [*values, *(1.0 for _ in needs)], -np.inf, self.limit / GiB)
