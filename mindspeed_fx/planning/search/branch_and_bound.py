"""The search over layouts: every way to factor the world, each with its best choice for every operator.

Exact for the model: a layout is left out only when its lower bound (compute, inner collectives and optimizer alone,
then the linear relaxation) is above the best few found, or when no choice in it fits in memory. More recomputation, or
more microbatches without a pipeline, is not tried where the same layout without it fits: it only costs time.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from mindspeed_fx.arguments import parse_bytes
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.planning.search.costs import Prices
from mindspeed_fx.planning.search.layouts import RECOMPUTE, ZERO, Layout, meshes
from mindspeed_fx.planning.search.layouts import microbatches as microbatch_counts
from mindspeed_fx.planning.search.lower_bounds import LowerBounds, batch_parts
from mindspeed_fx.planning.search.problem import Node, Problem
from mindspeed_fx.planning.search.schedules import schedules
from mindspeed_fx.planning.search.solution import Solution, Unsayable
from mindspeed_fx.planning.search.solve import Allowed, Program
from mindspeed_fx.report import progress
from mindspeed_fx.sharding.plan import ShardingError


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


def _counts(mesh: tuple[int, ...], rows: int, microbatches: int | None) -> list[int]:
    """Numbers of microbatches to consider on a mesh, of ``rows`` sequences in all."""
    own, more = divmod(rows, mesh[1] * mesh[3])
    if more:  # the batch is padded once for the step
        return [1] if microbatches in (None, 1) else []
    if microbatches is None:
        return microbatch_counts(mesh[0], own)
    return [microbatches] if own % microbatches == 0 else []


def _without_stages(problem: Problem, factored: list[tuple[int, ...]], stages: int) -> list[tuple[int, ...]]:
    """The meshes of a model that cannot be cut into stages; a note says why where some are left out.

    Raises:
        ShardingError: ``stages`` are asked for.
    """
    if stages > 1:
        raise ShardingError(f'mesh dimension "pp": {problem.no_stages}')
    result = [mesh for mesh in factored if mesh[0] == 1]
    note = f"no plan has stages of a pipeline: {problem.no_stages}"
    if len(result) < len(factored) and note not in problem.notes:
        problem.notes.append(note)
    return result


def branch_and_bound(
    problem: Problem,
    hw: Hardware,
    devices: int,
    memory: float,
    *,
    fixed: dict[str, int] | None = None,
    keep: int = 5,
    optimizer: str = "adam",
    pipeline: bool = True,
    zero: tuple[str, ...] = ZERO,
    recompute: tuple[str, ...] = RECOMPUTE,
    microbatches: int | None = None,
    allowed: Allowed | None = None,
    strategies: tuple[str, ...] = (),
) -> Outcome:
    """The fastest ``keep`` meshes with the best plan of each.

    Args:
        memory: bytes that one rank may hold.
        fixed: sizes of mesh dimensions that are given.
        microbatches: how many; None: those of :func:`~mindspeed_fx.planning.search.layouts.microbatches`.
        allowed: strategies that may be used; None: all.
        strategies: names of the ways on cp that may be used; (): all.

    Raises:
        ShardingError: nothing fits, with what the least demanding layout needs.
    """
    prices = Prices(problem, hw, optimizer, strategies)
    axes, batch = problem.axes, problem.batch
    rows = axes.size[batch] if batch is not None else 1
    length = axes.size[problem.sequence] if problem.sequence is not None else 1
    experts = min((axes.size[e] for e in problem.experts.values()), default=0)
    layers = sum(map(len, problem.runs))
    if not experts and (fixed or {}).get("ep", 1) > 1:
        raise ShardingError(
            'mesh dimension "ep" divides experts, and none were found: weights [experts, ., .] in grouped products, or '
            'a list of modules in a loop that gives each the tokens that chose it. Name the dimension "dp"'
        )
    if (stages := (fixed or {}).get("pp", 1)) > max(1, layers):
        raise ShardingError(
            f'mesh dimension "pp": {stages} stages need as many layers of one kind in a row, and the model has '
            f"{layers or 'none'}"
        )
    factored = list(meshes(devices, rows, length, layers, experts, fixed or {}, pipeline, hw.node))
    if problem.no_stages:
        factored = _without_stages(problem, factored, stages)
    if not factored:
        raise ShardingError(
            f"{devices} devices cannot share a batch of {rows} and a sequence of "
            f"{length}{f' with {fixed}' if fixed else ''}; give a larger batch"
        )
    if not any(_counts(mesh, rows, microbatches) for mesh in factored):
        raise ShardingError(f"{rows} sequences cannot be divided into {microbatches} microbatches on {devices} devices")
    progress.enter("layouts")
    state = _State(prices, memory, keep, allowed)
    offered = [
        (Layout(*mesh, m, z, recompute[0]), zero[2:] if z == "zero2" else ())
        for mesh in factored
        for m in _counts(mesh, rows, microbatches)
        for z in (zero[:2] if mesh[1] * mesh[2] * mesh[3] > 1 else ("never",))
    ]
    offered = [
        (dataclasses.replace(layout, schedule=name, virtual=virtual) if virtual > 1 else layout, more)
        for layout, more in offered
        for name, virtual in schedules(layout, layers)
    ]
    # a bound is one for finer cuts too
    for number, (layout, more) in enumerate(sorted(offered, key=lambda o: batch_parts(o[0]))):
        progress.note("bounds", number, len(offered))
        state.offer(layout, recompute, more)
    state.run()
    state.close()
    if not state.best:
        raise ShardingError(f"no plan for {devices} {hw.name} fits in {memory / 2**30:.1f} GiB; {state.nearest()}")
    result = sorted(state.best.values(), key=lambda s: s.seconds)[:keep]
    bound = min(*state.bounds, result[0].seconds)
    return Outcome(result, bound, len(factored), state.solved, state.too_large, state.times)


@dataclass(order=True)
class _Waiting:
    """A layout in line."""

    bound: float
    """Seconds that it takes at least."""
    number: int
    layout: Layout = field(compare=False)
    recompute: tuple[str, ...] = field(compare=False)
    zero: tuple[str, ...] = field(compare=False)
    """What may be tried where it does not fit: more recomputation, ZeRO stages."""
    updates: float = field(compare=False)
    """Seconds of the optimizer at least."""
    asked: int = field(default=0, compare=False)
    """How many of :attr:`_State.bounds_of` are in the bound."""
    program: Program | None = field(default=None, compare=False)


class _State:
    """Layouts waiting by lower bound, and the best of each mesh."""

    def __init__(self, prices: Prices, memory: float, keep: int, allowed: Allowed | None):
        self.prices, self.memory, self.keep, self.allowed = prices, memory, keep, allowed
        self.heap: list[_Waiting] = []
        self.lower_bounds = LowerBounds(prices, memory, allowed)
        self.best: dict[tuple, Solution] = {}
        self.open: list[tuple[float, int, Program, int]] = []
        """Programs whose relaxation had fractions, and where their bound is."""
        self.bounds: list[float] = []
        self.refused: list[tuple[float, int, Layout]] = []
        """Layouts that do not fit, with bytes that they need at least."""
        self.solved = self.too_large = 0
        self.done: set[tuple] = set()
        self.priced: dict[Layout, Program] = {}
        """Of each layout of a pipeline the program that was first priced."""
        self.times = {"prices": 0.0, "programs": 0.0}
        self.number = itertools.count()
        self.bounds_of = (
            lambda x: self.lower_bounds.least_work(x),
            lambda x: self.lower_bounds.least_work(x, self.lower_bounds.core(x, known=True)),
            lambda x: self.lower_bounds.least_work(x, self.lower_bounds.core(x)),
        )
        """Bounds in the order in which they are asked, each of more work than the one before; the first, in
        :meth:`offer`, is made of known ones.
        """

    def offer(self, layout: Layout, recompute: tuple[str, ...], zero: tuple[str, ...]) -> None:
        """Put a layout in line by the compute and the states that its parts of the work have at least."""
        start = time.perf_counter()
        updates, state = self.lower_bounds.least_stored(layout)
        if state > self.memory:
            self._refuse(layout, state)
            if zero:  # recomputing changes nothing about states
                self.offer(dataclasses.replace(layout, zero=zero[0]), recompute, zero[1:])
        else:
            heapq.heappush(
                self.heap,
                _Waiting(
                    updates + self.lower_bounds.least_work(layout, known=True),
                    next(self.number),
                    layout,
                    recompute,
                    zero,
                    updates,
                ),
            )
        self.times["prices"] += time.perf_counter() - start

    def better(self, waiting: _Waiting) -> bool:
        """Put a layout in line by the next bound; False where it has had all."""
        if waiting.asked == len(self.bounds_of):
            return False
        start = time.perf_counter()
        bound = waiting.updates + self.bounds_of[waiting.asked](waiting.layout)
        heapq.heappush(
            self.heap,
            dataclasses.replace(
                waiting, bound=max(waiting.bound, bound), number=next(self.number), asked=waiting.asked + 1
            ),
        )
        self.times["prices"] += time.perf_counter() - start
        return True

    def more(self, layout: Layout, recompute: tuple[str, ...], zero: tuple[str, ...]) -> None:
        """What needs less memory and more time than ``layout``."""
        if len(recompute) > 1:
            self.offer(dataclasses.replace(layout, recompute=recompute[1]), recompute[1:], ())
        if zero:
            self.offer(dataclasses.replace(layout, zero=zero[0]), recompute, zero[1:])

    def limit(self, mesh: tuple) -> float:
        """Bounds from here on can change nothing: the mesh has a better plan, or there are enough better meshes."""
        times = sorted(s.seconds for s in self.best.values())
        return min(
            times[self.keep - 1] if len(times) >= self.keep else float("inf"),
            getattr(self.best.get(mesh), "seconds", float("inf")),
        )

    def run(self) -> None:
        progress.enter("programs")
        most = 0
        while self.heap:
            most = max(most, len(self.heap))
            progress.note("layouts", most - len(self.heap), most)
            waiting = heapq.heappop(self.heap)
            layout, program, recompute, zero = waiting.layout, waiting.program, waiting.recompute, waiting.zero
            if waiting.bound >= self.limit(layout.mesh) or (
                layout.pp == 1 and (layout.mesh, layout.zero, layout.recompute) in self.done
            ):
                continue
            if self.better(waiting):
                continue
            if program is None:
                self.price(waiting)
                continue
            start = time.perf_counter()
            result = program.solve()
            self.times["programs"] += time.perf_counter() - start
            self.solved += 1
            slack = False
            if result is None:
                self._refuse(layout, self.memory)
            else:
                bound, chosen = result
                slack = program.slack
                self.bounds.append(bound)
                if bound < self.limit(layout.mesh):
                    self._round(program, chosen, bound)
            if slack:
                self.done.add((layout.mesh, layout.zero, layout.recompute))
            else:
                self.more(layout, recompute, zero)

    def _round(self, program: Program, chosen: dict[Node, int], bound: float) -> None:
        """Take the choice of a relaxation whose bound is the last of :attr:`bounds`."""
        try:
            self._enter(program.evaluate(chosen, bound))
        except Unsayable:
            if not program.fractional:
                raise
        if program.fractional:
            self.open.append((bound, next(self.number), program, len(self.bounds) - 1))

    def price(self, waiting: _Waiting) -> None:
        """Put a layout in line by the bound of its own prices, if it may fit in memory."""
        start = time.perf_counter()
        layout = waiting.layout
        if (memory := self.lower_bounds.least_memory(layout)) > self.memory:
            self._refuse(layout, memory)
            self.more(layout, waiting.recompute, waiting.zero)
        elif (program := Program(self.prices, layout, self.memory, self.allowed)).possible:
            self._price(program)
            seconds = program.lower(self.lower_bounds.core(layout))
            if seconds < self.limit(layout.mesh):
                bound = max(waiting.bound, seconds)
                heapq.heappush(
                    self.heap, dataclasses.replace(waiting, bound=bound, number=next(self.number), program=program)
                )
        self.times["prices"] += time.perf_counter() - start

    def _price(self, program: Program) -> None:
        """Prices are the same under every schedule."""
        like = dataclasses.replace(program.layout, schedule="1F1B", virtual=1)
        program.priced(self.priced.get(like))
        if program.layout.pp > 1:
            self.priced.setdefault(like, program)

    def _refuse(self, layout: Layout, least: float) -> None:
        self.too_large += 1
        self.refused.append((least, next(self.number), layout))

    def nearest(self, tried: int = 12) -> str:
        """What the least demanding layout needs, and what for: of the layouts that do not fit, those with the lowest
        bounds are tried.
        """
        best: Solution | None = None
        for _, _, layout in heapq.nsmallest(tried, self.refused):
            program = Program(self.prices, layout, self.memory, self.allowed)
            if program.possible:
                program.priced()
                result = program.least_memory()
                best = result if result is not None and (best is None or result.memory < best.memory) else best
        if best is None:
            return "no layout of these devices has a way to compute every operator; use other sizes of the mesh"
        shown = {k: f"{v / 2**30:.1f}" for k, v in best.bytes.items()}
        node = best.widest
        sizes = ", ".join(str(tuple(u.shape)) for u in node.uses[:2])
        module = f' of module "{node.module}"' if node.module else ""
        where = f"{node.op}{module} ({sizes} in the whole model)"
        advice = {
            "states": "use more devices",
            "kept": "use more devices or shorter sequences",
            "operator": "shorter sequences would help, more devices if their dimensions divide it",
            "gathered": "use larger tp or ep",
        }
        return (
            f"the least demanding that was tried ({best.layout}) needs {best.memory / 2**30:.1f} GiB: "
            f"{shown['states']} of parameters, gradients and optimizer states, "
            f"{shown['kept']} of activations kept, {shown['gathered']} of gathered parameters, {shown['operator']} "
            f"while {where} runs backward; "
            f"{advice[max(best.bytes, key=best.bytes.get)]}"
        )

    def _enter(self, solution: Solution) -> None:
        mine = self.best.get(solution.layout.mesh)
        if solution.memory <= self.memory * (1 + 1e-9) and (mine is None or solution.seconds < mine.seconds):
            self.best[solution.layout.mesh] = solution

    def close(self, seconds: float = 3.0) -> None:
        """Solve in integers what rounding left open, most promising first, for this long; the bound stands in any
        case.
        """
        progress.enter("integers")
        start = time.perf_counter()
        for bound, _, program, place in sorted(self.open, key=lambda o: o[:2]):
            remaining = seconds - (time.perf_counter() - start)
            if remaining <= 0:
                break
            if bound >= self.limit(program.layout.mesh) * (1 - 1e-4):
                continue
            if (result := program.solve(integral=True, seconds=remaining)) is not None:
                self.bounds[place] = max(bound, result[0])
                self._enter(program.evaluate(result[1], self.bounds[place]))
            elif program.infeasible:
                self.bounds[place] = float("inf")
        self.times["integers"] = time.perf_counter() - start


def memory_of(arg: Any, hw: Hardware) -> float:
    """Bytes from "60GiB" or a number; None: nine tenths of the device's memory.

    Raises:
        OptionError: no number of bytes, or less than a MiB.
    """
    if arg is None:
        return 0.9 * float(hw.memory)
    if not (size := parse_bytes("memory", arg, least=2**20)):
        raise OptionError(f'option "memory" is {arg!r}; valid: bytes of one device, as in "60GiB"')
    return float(size)
