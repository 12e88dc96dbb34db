"""The search over layouts: every way to factor the world, each with its best choice for every operator.

Exact for the model: a layout is left out only when its lower bound (compute, inner collectives and optimizer alone, then the
linear relaxation) is above the best few found, or when no choice in it fits in memory. More recomputation, or more
microbatches without a pipeline, is not tried where the same layout without it fits: it only costs time.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from mindspeed_fx.cost.hardware import Hardware
from mindspeed_fx.passes.sharding.plan import ShardingError
from mindspeed_fx.passes.sharding.search.graph import Problem
from mindspeed_fx.passes.sharding.search.layouts import RECOMPUTE, ZERO, Layout, meshes, microbatches
from mindspeed_fx.passes.sharding.search.price import Prices
from mindspeed_fx.passes.sharding.search.solve import Allowed, Program, Solution, Unsayable


@dataclass
class Outcome:
    """What a search found."""

    solutions: list[Solution]
    """The best of each mesh, fastest first."""
    bound: float
    """Seconds that no plan of the space is below."""
    layouts: int
    """How many there are."""
    solved: int
    """How many programs were solved."""
    too_large: int
    """Layouts that do not fit in memory."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Of the search itself, by part."""

    @property
    def gap(self) -> float:
        """How much faster than the plan found a plan of the space can be at most, as a fraction."""
        return max(0.0, self.solutions[0].seconds / self.bound - 1)


def search(problem: Problem, hw: Hardware, devices: int, memory: float, *, fixed: dict[str, int] | None = None, keep: int = 5, optimizer: str = "adam", pipeline: bool = True, zero: tuple[str, ...] = ZERO, recompute: tuple[str, ...] = RECOMPUTE, allowed: Allowed | None = None, ways: tuple[str, ...] = ()) -> Outcome:
    """The fastest ``keep`` meshes with the best plan of each.

    Args:
        memory: bytes that one rank may hold.
        fixed: sizes of mesh dimensions that are given.
        allowed: strategies that may be used; None: all.
        ways: names of the ways on cp that may be used; (): all.

    Raises:
        ShardingError: nothing fits, with what the least demanding layout needs.
    """
    prices = Prices(problem, hw, optimizer, ways)
    axes, batch = problem.axes, problem.batch
    rows = axes.size[batch] if batch is not None else 1
    length = axes.size[problem.sequence] if problem.sequence is not None else 1
    experts = min((axes.size[e] for e in problem.experts.values()), default=0)
    layers = sum(map(len, problem.runs))
    factored = list(meshes(devices, rows, length, layers, experts, fixed or {}, pipeline, hw.node))
    if not factored:
        raise ShardingError(f"{devices} devices cannot share a batch of {rows} and a sequence of {length}{f' with {fixed}' if fixed else ''}; give a larger batch")
    state = _State(prices, memory, keep, allowed)
    for mesh in factored:
        pp, dp, cp, ep, tp = mesh
        for m in microbatches(pp, rows // (dp * ep)):
            for z in zero[:2] if dp * cp * ep > 1 else ("never",):
                state.offer(Layout(pp, dp, cp, ep, tp, m, z, recompute[0]), recompute, zero[2:] if z == "zero2" else ())
    state.run()
    state.close()
    if not state.best:
        raise ShardingError(f"no plan for {devices} {hw.name} fits in {memory / 2**30:.1f} GiB; the least demanding one that was tried needs {state.least / 2**30:.1f} GiB of states alone; use more devices or a smaller batch")
    found = sorted(state.best.values(), key=lambda s: s.seconds)[:keep]
    return Outcome(found, min(*state.bounds, found[0].seconds), len(factored), state.solved, state.too_large, state.times)


class _State:
    """Layouts waiting by lower bound, and the best of each mesh."""

    def __init__(self, prices: Prices, memory: float, keep: int, allowed: Allowed | None):
        self.prices, self.memory, self.keep, self.allowed = prices, memory, keep, allowed
        self.heap: list[tuple[float, int, Layout, Program | None, tuple[str, ...], tuple[str, ...]]] = []
        self.work: dict[tuple, dict[int, list[float]]] = {}
        self.store: dict[tuple, dict[int, list[float]]] = {}
        self.cores: dict[tuple, float] = {}
        self.best: dict[tuple, Solution] = {}
        self.open: list[tuple[float, int, Program, int]] = []
        """Programs whose relaxation had fractions, and where their bound is."""
        self.bounds: list[float] = []
        self.least = float("inf")
        self.solved = self.too_large = 0
        self.done: set[tuple] = set()
        self.bounded: set[Layout] = set()
        """Layouts in line by :meth:`bound`."""
        self.times = {"prices": 0.0, "programs": 0.0}
        self.number = itertools.count()

    def offer(self, layout: Layout, recompute: tuple[str, ...], zero: tuple[str, ...]) -> None:
        """Put a layout in line by the compute and the states that its parts of the work have at least."""
        start = time.perf_counter()
        updates, state = self.least_stored(layout)
        self.least = min(self.least, state)
        if state > self.memory:
            self.too_large += 1
            if zero:  # recomputing changes nothing about states
                self.offer(dataclasses.replace(layout, zero=zero[0]), recompute, zero[1:])
        else:
            heapq.heappush(self.heap, (updates + self.least_work(layout), next(self.number), layout, None, recompute, zero))
        self.times["prices"] += time.perf_counter() - start

    def bound(self, layout: Layout) -> float | None:
        """A bound that many layouts share and that knows the collectives between operators; None where there are none, or the layout is in line by it."""
        if layout.tp == 1 or layout in self.bounded:
            return None
        self.bounded.add(layout)
        start = time.perf_counter()
        better = self.least_stored(layout)[0] + self.least_work(layout, self.core(layout))
        self.times["prices"] += time.perf_counter() - start
        return better

    def least_work(self, layout: Layout, core: float = 0.0) -> float:
        """Seconds that compute and inner collectives take at least, from a table that many layouts share.

        Args:
            core: seconds of one microbatch in all layers at least, with the collectives between operators.
        """
        p, key = self.prices, (layout.tp, layout.ep, layout.cp, layout.dp * layout.microbatches)
        if key not in self.work:
            table = self.work[key] = {run: [0.0, 0.0] for run in range(-1, len(p.problem.runs))}
            for n in p.problem.nodes:
                mine = [p.activations(n, s, layout) for s in self._allowed(n, layout)]
                table[n.run][0] += min((x.forward + x.backward + x.moved for x in mine), default=float("inf"))
                table[n.run][1] += min((x.forward for x in mine), default=0.0)
        turns, full = layout.microbatches + layout.pp - 1, layout.recompute == "full"
        rows = [(self._weight(r, layout), w, r) for r, w in self.work[key].items()]
        layers = sum(map(len, p.problem.runs))
        flat = max(sum(n * w[0] for n, w, _ in rows), (-(-layers // layout.pp) / layers if layers else 1.0) * core)
        return turns * (flat + full * sum(n * w[1] for n, w, r in rows if r >= 0))

    def least_stored(self, layout: Layout) -> tuple[float, float]:
        """Seconds of the optimizer and bytes of states at least."""
        p, key = self.prices, (layout.tp, layout.ep, layout.dp * layout.cp, layout.ranks_per_node("data", self.prices.hw.node), layout.ranks_per_node("expert", self.prices.hw.node), layout.zero)
        if key not in self.store:
            table = self.store[key] = {run: [0.0, 0.0] for run in range(-1, len(p.problem.runs))}
            for n in (n for n in p.problem.nodes if p.stores[n.name]):
                mine = [p.stored(n, s, layout) for s in self._allowed(n, layout)]
                table[n.run][0] += min((x.update for x in mine), default=0.0)
                table[n.run][1] += min((x.state for x in mine), default=0.0)
        rows = [(self._weight(r, layout), w) for r, w in self.store[key].items()]
        return sum(w * x[0] for w, x in rows), sum(w * x[1] for w, x in rows)

    def _allowed(self, node: Any, layout: Layout) -> list:
        return [s for s in self.prices.strategies(node, layout) if self.allowed is None or self.allowed(node, s)]

    def _weight(self, run: int, layout: Layout) -> float:
        """How often the fullest stage has the operators of a run."""
        runs = self.prices.problem.runs
        layers = sum(map(len, runs))
        return len(runs[run]) * (-(-layers // layout.pp) / layers) if run >= 0 else 1.0

    def core(self, layout: Layout) -> float:
        """See :meth:`Program.core`."""
        key = (layout.tp, layout.ep, layout.cp, layout.dp * layout.microbatches)
        if layout.tp == 1:
            return 0.0
        if key not in self.cores:
            program = Program(self.prices, layout, self.memory, self.allowed)
            program.priced()
            self.cores[key] = program.core() if program.possible else float("inf")
        return self.cores[key]

    def more(self, layout: Layout, recompute: tuple[str, ...], zero: tuple[str, ...]) -> None:
        """What needs less memory and more time than ``layout``."""
        if len(recompute) > 1:
            self.offer(dataclasses.replace(layout, recompute=recompute[1]), recompute[1:], ())
        if zero:
            self.offer(dataclasses.replace(layout, zero=zero[0]), recompute, zero[1:])

    def limit(self, mesh: tuple) -> float:
        """Bounds from here on can change nothing: the mesh has a better plan, or there are enough better meshes."""
        times = sorted(s.seconds for s in self.best.values())
        return min(times[self.keep - 1] if len(times) >= self.keep else float("inf"), getattr(self.best.get(mesh), "seconds", float("inf")))

    def run(self) -> None:
        while self.heap:
            lower, _, layout, program, recompute, zero = heapq.heappop(self.heap)
            if lower >= self.limit(layout.mesh) or (layout.pp == 1 and (layout.mesh, layout.zero, layout.recompute) in self.done):
                continue
            if program is None and (better := self.bound(layout)) is not None:
                heapq.heappush(self.heap, (max(lower, better), next(self.number), layout, None, recompute, zero))
                continue
            if program is None:
                start = time.perf_counter()
                program = Program(self.prices, layout, self.memory, self.allowed)
                if program.possible:
                    program.priced()
                    seconds, memory = program.lower(self.core(layout))
                    if memory > self.memory:
                        self.too_large += 1
                        self.more(layout, recompute, zero)
                    elif seconds < self.limit(layout.mesh):
                        heapq.heappush(self.heap, (max(lower, seconds), next(self.number), layout, program, recompute, zero))
                self.times["prices"] += time.perf_counter() - start
                continue
            start = time.perf_counter()
            made = program.solve()
            self.times["programs"] += time.perf_counter() - start
            self.solved += 1
            slack = False
            if made is None:
                self.too_large += 1
            else:
                bound, chosen = made
                slack = program.slack
                try:
                    self._enter(program.evaluate(chosen, bound))
                except Unsayable:
                    if not program.fractional:
                        raise
                self.bounds.append(bound)
                if program.fractional:
                    self.open.append((bound, next(self.number), program, len(self.bounds) - 1))
            if slack:
                self.done.add((layout.mesh, layout.zero, layout.recompute))
            else:
                self.more(layout, recompute, zero)

    def _enter(self, solution: Solution) -> None:
        mine = self.best.get(solution.layout.mesh)
        if solution.memory <= self.memory * (1 + 1e-9) and (mine is None or solution.seconds < mine.seconds):
            self.best[solution.layout.mesh] = solution

    def close(self, seconds: float = 3.0) -> None:
        """Solve in integers what rounding left open, most promising first, for this long; the bound stands in any case."""
        start = time.perf_counter()
        for bound, _, program, place in sorted(self.open, key=lambda o: o[:2]):
            left = seconds - (time.perf_counter() - start)
            if left <= 0:
                break
            if bound >= self.limit(program.layout.mesh) * (1 - 1e-4):
                continue
            if (made := program.solve(integral=True, seconds=left)) is not None:
                self.bounds[place] = max(bound, made[0])
                self._enter(program.evaluate(made[1], self.bounds[place]))
            elif program.infeasible:
                self.bounds[place] = float("inf")
        self.times["integers"] = time.perf_counter() - start


def memory_of(given: Any, hw: Hardware) -> float:
    """Bytes from "60GiB" or a number; None: nine tenths of the device's memory.

    Raises:
        OptionError: no number of bytes.
    """
    from mindspeed_fx.options import _bytes

    return 0.9 * float(hw.memory) if given is None else float(_bytes("memory", given))
