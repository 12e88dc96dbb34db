"""The least time of a small step as an integer program (HiGHS through scipy): a lower bound, and a choice.

Binary s_v says that value v is saved, r_v that it is recomputed. Times, and who needs whom, are those of the minimum
cut; the memory at moment t is at least c_t + sum of w_tv s_v, as in
:mod:`mindspeed_fx.passes.recompute.solve.lower_bound`, which must fit at every moment at once. That knows nothing of
what a chain that is recomputed holds beside what is saved. So where the program's answer does not fit the simulated
step, :mod:`row_generation` adds rows for that moment and solves it again. With begin_v the first moment at which the
backward's own nodes read v:

- a_tv says that v has been recomputed by moment t. What is read by then has been saved or made; what is made needs what
  it reads: s_v + a_tv >= 1 for begin_v <= t, and s_v + a_tv >= a_tu for all u that read v. Made values that are read
  later are alive: c_t + sum of w_tv s_v + sum over begin_v > t of size_v a_tv <= limit.
- While i is recomputed right before moment t, it and all it reads are alive, and all that has been made by then and is
  read at t or later. That row holds where a_ti = 1 and a_(t-1)i = 0.

Every row holds for every plan, so each program's bound is one of the time of every plan that fits, and an answer that
fits is the optimum. Of no use for a large step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from mindspeed_fx.passes.recompute.problem.remat_problem import Plan, RematProblem
from mindspeed_fx.passes.recompute.solve.lower_bound import Moments

SCALE = 1e6
"""Microseconds, and parts of the limit: numbers near one for the solver."""

SAFE = 1e-6
"""What the solver's tolerances may take from a bound, of the bound."""

AT_ONCE = 4
"""Moments whose rows are added between two of them; with ROUNDS of row_generation.py for the same table."""


@dataclass
class Program:
    """Rows are sums of factor * column that are at least ``least``; columns 0 ... are s, then r, then what rows
    need.
    """

    schedule: RematProblem
    rows: Moments
    limit: int
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    columns_of: dict[int, dict[int, int]] = field(default_factory=dict)
    """Moment -> value -> column of a."""
    later: dict[int, dict[int, int]] = field(default_factory=dict)
    """Moment -> value -> column of what is alive for something that is recomputed later."""
    ahead: set[int] = field(default_factory=set)
    """Nodes of the forward whose moment has its row."""
    recompute: set[tuple[int, int]] = field(default_factory=set)
    """(node, moment) of the rows that hold while something is made."""

    def __post_init__(self) -> None:
        s, count = self.schedule, len(self.schedule.values)
        self.save = {v: n for n, v in enumerate(s.values)}
        self.make = {v: count + n for n, v in enumerate(s.values)}
        self.kept, self.ends = {s.root[i] for i in s.returned}, {s.root[i] for i in s.gradients}
        self.extra = s.extra
        self.columns, self.cut = 2 * count, len(self.rows.certain) - len(s.backward)
        self.reads = {v: [a for a in s.reads(v) if a in self.save] for v in s.values}
        self.readers: dict[int, list[int]] = {v: [] for v in s.values}
        for u, reads in self.reads.items():
            for v in reads:
                self.readers[v].append(u)
        needed = {s.root[i] for i in s.needed}
        for v in s.values:
            if v in needed:
                self.at_least([(self.save[v], 1), (self.make[v], 1)], 1)
            for a in self.reads[v]:
                self.at_least([(self.save[a], 1), (self.make[a], 1), (self.make[v], -1)], 0)
        for t, certain in enumerate(self.rows.certain):
            self.fits(
                [(self.save[v], w) for v, w in self.rows.at(t).items() if v in self.save and v not in self.kept],
                certain,
            )

    def at_least(self, parts: list[tuple[int, float]], low: float) -> None:
        self.entries.extend((len(self.least), column, factor) for column, factor in parts)
        self.least.append(low)

    def fits(self, parts: list[tuple[int, float]], constant: float, room: float = 0.0) -> None:
        """``constant`` and the bytes in ``parts`` are at most the limit and ``room``."""
        if parts:
            self.at_least([(c, -w / self.limit) for c, w in parts], (constant - self.limit - room) / self.limit - 1e-9)

    def solve(self, nodes: int, clock: float | None, below: float | None) -> tuple[list[int] | None, float | None]:
        """(what the answer saves or None, the proved least seconds or None when there is no answer below ``below``)."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        s, count = self.schedule, len(self.schedule.values)
        upper, cost, whole = np.ones(self.columns), np.zeros(self.columns), np.zeros(self.columns)
        for v in s.values:
            if not s.savable[v] or s.must_recompute[v]:
                upper[self.save[v]] = 0
            if self.extra[v] == math.inf:
                upper[self.make[v]] = 0
            cost[self.save[v]], cost[self.make[v]] = (
                s.save_seconds[v] * SCALE,
                0.0 if self.extra[v] == math.inf else self.extra[v] * SCALE,
            )
        whole[: 2 * count] = 1
        entries, least = list(self.entries), list(self.least)
        if below is not None:
            entries += [(len(least), int(c), -cost[c]) for c in np.flatnonzero(cost)]
            least.append(-below * SCALE)
        i, j, x = zip(*entries) if entries else ((0,), (0,), (0.0,))
        matrix = coo_array((x, (i, j)), shape=(max(1, len(least)), self.columns)).tocsr()
        options = {"node_limit": nodes, **({"time_limit": clock} if clock else {})}
        result = milp(
            cost,
            integrality=whole,
            bounds=Bounds(0, upper),
            constraints=LinearConstraint(matrix, np.array(least or [0.0])),
            options=options,
        )
        if result.status == 2:
            return None, None
        proved = (
            result.mip_dual_bound if result.mip_dual_bound is not None and math.isfinite(result.mip_dual_bound) else 0.0
        )
        saved = None if result.x is None else [v for v in s.values if result.x[self.save[v]] > 0.5 or v in self.kept]
        return saved, max(0.0, proved) * (1 - SAFE) / SCALE

    def refine(self, plan: Plan) -> bool:
        """Rows for the moments at which a plan does not fit; False when all of them are there already."""
        s = self.schedule
        run, alive, cut = s.trace(plan)
        moment, t = [0] * len(run), -1
        place = {i: k for k, i in enumerate(s.backward, self.cut)}
        for p in range(len(run) - 1, cut - 1, -1):
            t = place.get(run[p], t)
            moment[p] = t
        over = sorted(
            (p for p in range(len(run)) if alive[p] > self.limit and (p < cut or moment[p] >= 0)),
            key=lambda p: (-alive[p], p),
        )
        added: set[int] = set()
        for p in over:
            t = moment[p] if p >= cut else -1 - run[p]
            if t in added or len(added) >= AT_ONCE:
                continue
            if p < cut:
                if run[p] not in self.ahead:
                    self.before(run[p])
                    added.add(t)
            elif t not in self.columns_of:
                self.columns_at(t)
                added.add(t)
            elif run[p] not in place and (run[p], t) not in self.recompute:
                self.during(run[p], t)
                added.add(t)
        return bool(added)

    def columns_at(self, t: int) -> dict[int, int]:
        """Columns of what has been recomputed by moment t; with their rows where they are new."""
        if t in self.columns_of:
            return self.columns_of[t]
        s, rows = self.schedule, self.rows
        read = [v for v in s.values if rows.begin[v] <= t]
        todo, closed = list(read), set(read)
        while todo:
            for a in self.reads[todo.pop()]:
                if a not in closed:
                    closed.add(a)
                    todo.append(a)
        columns = self.columns_of[t] = {v: self.columns + n for n, v in enumerate(sorted(closed))}
        self.columns += len(columns)
        for v in read:
            self.at_least([(self.save[v], 1), (columns[v], 1)], 1)
        for v, column in columns.items():
            self.at_least([(self.make[v], 1), (column, -1)], 0)
            for a in self.reads[v]:
                self.at_least([(self.save[a], 1), (columns[a], 1), (column, -1)], 0)
        length = len(rows.certain)
        parts = [(self.save[v], w) for v, w in rows.at(t).items() if v in self.save and v not in self.kept]
        parts += [
            (column, s.size[v])
            for v, column in columns.items()
            if t < rows.begin[v] < length and v not in self.kept and s.size[v]
        ]
        self.later[t] = self.kept_on(t)
        self.fits([*parts, *((column, s.size[v]) for v, column in self.later[t].items())], rows.certain[t])
        return columns

    def kept_on(self, t: int) -> dict[int, int]:
        """Columns of what is alive at moment t, when nothing but what is recomputed after it reads it any more."""
        s, rows, length, result = self.schedule, self.rows, len(self.rows.certain), self.columns_of[t]
        results: dict[int, int] = {}
        for v in result:
            over = rows.end[v] < t and v not in self.ends if rows.begin[v] < length else True
            if (
                not over
                or v in self.kept
                or not s.size[v]
                or any(first <= t <= last for _, first, last in ([rows.lives[v]] if v in rows.lives else []))
            ):
                continue
            for u in self.readers[v]:
                column = results.setdefault(v, self.columns + len(results))
                self.at_least(
                    [
                        (column, 1),
                        (self.save[v], -1),
                        (result[v], -1),
                        (self.make[u], -1),
                        *([(result[u], 1)] if u in result else []),
                    ],
                    -1,
                )
        self.columns += len(results)
        return results

    @cached_property
    def early(self) -> dict[int, int]:
        """Columns of what the forward runs only for what is saved, with their rows."""
        s, runs = self.schedule, self.schedule.computing(self.schedule.returned)
        results = {v: self.columns + n for n, v in enumerate(v for v in s.values if not runs[v])}
        self.columns += len(results)
        for v, column in results.items():
            self.at_least([(column, 1), (self.save[v], -1)], 0)
            for a in self.reads[v]:
                if a in results:
                    self.at_least([(results[a], 1), (column, -1)], 0)
        return results

    def before(self, i: int) -> None:
        """While the forward runs ``i``: what is saved of all before it, and what later runs for it read."""
        self.ahead.add(i)
        s, rows, early, runs = self.schedule, self.rows, self.early, self.schedule.computing(self.schedule.returned)
        place = {n: k for k, n in enumerate(n for n in s.forward if runs[n])}
        k = place.get(i, sum(n < i for n in place))
        alive = lambda first, last: first <= k <= last if i in place else first < k <= last  # noqa: E731
        certain = {
            v
            for v in s.values
            if v in place
            and alive(place[v], max([place[v], *(place[u] for u in s.forward if runs[u] and v in s.reads(u))]))
        }
        constant = (
            rows.certain[k]
            if i in place
            else sum(w for w, first, last in rows.fixed if alive(first, last)) + s.workspace[i]
        )
        parts, added = (
            [(early[i], s.size[v]) for v in s._filled[i] if i in early and s.size[v] and v not in self.kept],
            0,
        )
        for v in s.values:
            if v >= i or v in certain or v in self.kept or not s.size[v] or v in s._filled[i]:
                continue
            column = self.columns + added
            added += 1
            self.at_least([(column, 1), (self.save[v], -1)], 0)
            for u in self.readers[v]:
                if u >= i and u in early:
                    self.at_least([(column, 1), (early[u], -1)], 0)
            parts.append((column, s.size[v]))
        self.columns += added
        parts += [
            (self.save[v], s.saved_bytes[v] - s.size[v])
            for v in certain
            if v not in self.kept and s.saved_bytes[v] > s.size[v]
        ]
        self.fits(parts, constant)

    def during(self, i: int, t: int) -> None:
        """While ``i`` is recomputed right before moment t."""
        self.recompute.add((i, t))
        s, rows, length = self.schedule, self.rows, len(self.rows.certain)
        now, before = self.columns_at(t), self.columns_at(t - 1) if t > self.cut else {}
        if i not in now:
            return
        existing = lambda v: rows.begin[v] < t and (t <= rows.end[v] or v in self.ends) or v in self.kept  # noqa: E731  certain anyhow
        fills = {v for v in s._filled[i] if v not in self.kept}
        held = {a for a in s.reads(i) if not s.is_input[a] and not existing(a)}
        constant = (
            sum(w for w, first, last in rows.fixed if first < t <= last)
            + s.workspace[i]
            + sum(s.size[v] for v in fills | held)
        )
        parts = []
        for v in s.values:
            if v in self.kept or v in held:
                continue
            w = sum(
                w
                for w, first, last in ([rows.lives[v]] if v in rows.lives else []) + rows.parts.get(v, [])
                if first <= t - 1 and (last >= t or last == t - 1 and rows.begin[v] == t)
            )
            if w:
                parts.append((self.save[v], w))
            if (
                t <= rows.begin[v] < length
                and v not in fills
                and s.size[v]
                and (column := (now if v < i else before).get(v)) is not None
            ):
                parts.append((column, s.size[v]))
            elif v < i and v not in fills and (column := self.later[t].get(v)) is not None:
                parts.append((column, s.size[v]))
        room = max(0, constant + sum(w for _, w in parts) - self.limit)
        parts.append((now[i], room))
        if i in before:
            parts.append((before[i], -room))
        self.fits(parts, constant, room)
