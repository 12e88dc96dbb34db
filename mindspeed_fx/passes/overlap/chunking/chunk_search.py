"""Steps with regions in chunks, modelled: which ways are tried, and what each comes to."""

from __future__ import annotations

import math
from typing import Any, Callable, Iterator, Sequence

import torch.fx as fx

from mindspeed_fx.compat import fx_graph
from mindspeed_fx.cost.device import Hardware
from mindspeed_fx.passes.base import Context
from mindspeed_fx.passes.overlap.chunking.chunk import compute_in_chunks
from mindspeed_fx.passes.overlap.chunking.chunk_spec import ChunkSpec, Draft, Parts, shares
from mindspeed_fx.passes.overlap.chunking.region import REACHES, Region, regions
from mindspeed_fx.passes.overlap.model.costs import cost_of, transfer
from mindspeed_fx.passes.overlap.model.simulator import simulate
from mindspeed_fx.passes.overlap.model.task_graph import GraphTasks, cached_tasks, saved_activation
from mindspeed_fx.passes.overlap.model.tasks import COMPUTE
from mindspeed_fx.passes.overlap.scheduler.local_search import schedule
from mindspeed_fx.passes.overlap.scheduler.min_memory_order import leaner, reorder

PARTS = (2, 4, 8)
TAPERED = ((1, 3, 3, 1), (1, 2, 2, 2, 1), (1, 3, 4), (4, 3, 1))
"""Chunks of unequal sizes: before the first and after the last one's collective nothing of its region can run, so that
these two had better be small. 35 162 nodes take 3212 ms with them, 3220 without (2026-11-22-overlap_time.txt).
"""
GAIN = 0.01
"""Share of the modelled step that chunks must save: more launches make the host busier, which the model does not
see.
"""
SURE = 60_000
"""Tasks that the search may place where whole and chunks are compared. With a quarter of that the step of eight Llama
layers comes out 6 % longer than with all, which hides what chunks gain; more finds nothing shorter."""
QUICK = 6
"""How often the search may place each task where the nodes of all ways are limited: as often as in a large graph, whose
schedule is to be foretold. So often it is also placed at first, in every way.
"""
NEAR = 1e-3
"""A way is searched with the whole effort where, with as little as QUICK for both, its step is shorter than without
chunks by this share at least. Of 42 steps none comes out longer with it and FEW than without, but for one by 0.4 %
(benchmarks/results/2026-11-26-chunk_search.txt).
"""

FEW = 2
"""Single regions, the most exposed first, that bring nothing one after the other before the rest is passed over."""


def disjoint(
    starts: Sequence[fx.Node], reach: str, read: Callable[[fx.Node, str], list[Region]] = regions
) -> Iterator[Region]:
    """Regions that share no node, the first along each collective's best dimension that can be cut. ``read``: what
    reads them, :func:`regions` or one that remembers."""
    taken: set[fx.Node] = set()
    for start in starts:
        if start in taken:
            continue
        for region in read(start, reach):
            if region.most_parts(PARTS) and not taken & set(region.cuts):
                taken |= set(region.cuts)
                yield region
                break


class Trials:
    """Steps with chunks, modelled.

    Args:
        owned: placeholders whose memory the graph may free; default: a backward's saved activations.
        allowance: bytes over the peak of the graph as it came; default: option "overlap_memory".
        within: nodes that the graphs of all ways that are tried may have together; what would come after is not tried.
            None: no limit.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        context: Context,
        hardware: Hardware,
        *,
        owned: Callable[[fx.Node], bool] | None = None,
        allowance: int | None = None,
        within: int | None = None,
    ):
        self.gm, self.context, self.hardware, self.within = gm, context, hardware, within
        self.owned = owned or (saved_activation if context.side == "backward" else None)
        self.allowance = context.options.overlap_memory if allowance is None else allowance
        self.places = {n: k for k, n in enumerate(gm.graph.nodes)}
        result = self.tasks(gm)
        self.nodes, self.work = result.nodes, result.tasks
        self.numbers = {n: i for i, n in enumerate(self.nodes)}
        self.limit = simulate(self.work).peak + self.allowance
        self.effort = max(
            min(96 * len(self.work), SURE), 6 * len(self.work)
        )  # half of it is for an order, the same from the end, and again
        self.sure = SURE
        if within is not None:
            self.effort, self.sure = QUICK * len(self.work), 2 * QUICK * len(self.work)
        self.plain = schedule(self.work, allowance=self.allowance, work=self.effort)
        self.reaches, self.parts = (REACHES, PARTS) if within is None else (REACHES[1:], PARTS[:2])
        self.quick: float | None = None
        self.told, self.seconds, self.values = "", self.plain.seconds, {}
        self.tried: dict[frozenset, tuple[int, float | None]] = {}
        self.size = 0

    def full(self) -> str | None:
        """Why no way of cutting can be worth it; None where one may: chunks add work to every stream, and take none
        away.
        """
        stream, busy = max(self.work.busy().items(), key=lambda item: item[1])
        if self.plain.seconds * (1 - GAIN) > busy:
            return None
        return (
            f"no chunks can save {GAIN:.0%}: {'compute' if stream == COMPUTE else f'link {stream}'} alone takes "
            f"{busy / max(self.plain.seconds, 1e-30):.1%} of the step"
        )

    def best(self, results: dict[str, list[Region]]) -> list[tuple[Region, Parts]]:
        """Regions and their numbers of chunks with the shortest step, :attr:`seconds`; [] when none saves GAIN."""
        seconds, chosen = self.plain.seconds, []
        if self.full() is None:
            for reach in self.reaches:
                for parts in self.parts if results[reach] else ():
                    outputs = [(r, parts) for r in results[reach] if parts in r.most_parts(PARTS)]
                    now = self.way(outputs, below=self._most())
                    if now is not None and now < seconds:
                        seconds, chosen = now, outputs
            if seconds > self._most():  # all at once brings little: fewer may bring more
                kinds = [same for reach in self.reaches for same in alike(results[reach])]
                seconds, chosen = min((seconds, chosen), self._added(self.plain.seconds, kinds), key=lambda end: end[0])
            if chosen:
                seconds, chosen = self._refined(seconds, chosen)
        if chosen:  # a quick search may find less for one of the two
            self.effort, self.within = self.sure, None
            self.plain = min(
                self.plain, schedule(self.work, allowance=self.allowance, work=self.effort), key=lambda t: t.seconds
            )
            seconds = min(seconds, self.way(chosen) or seconds)
        if seconds > self.plain.seconds * (1 - GAIN):
            seconds, chosen = self.plain.seconds, []
        return self.settled(seconds, chosen)

    def settled(self, seconds: float, chosen: list[tuple[Region, Parts]]) -> list[tuple[Region, Parts]]:
        """Notes what was found; returns ``chosen``."""
        self.seconds = seconds
        self.told = (
            f"modelled step {self.plain.seconds * 1e3:.3f} ms whole, {seconds * 1e3:.3f} ms with "
            f"{len(chosen)} "
            f"regions in chunks ({len(self.tried)} ways tried; less than {GAIN:.0%} is not taken)"
        )
        return chosen

    def _most(self) -> float:
        """Seconds that a step must stay under to save GAIN. Where one stream alone has as much to do, adding regions
        does not help: they take no work away."""
        return self.plain.seconds * (1 - GAIN)

    def _exposed(self, region: Region) -> float:
        """Seconds for which the region's collectives are exposed without chunks."""
        starts = set(region.starts)
        return sum(seconds for i, seconds in self.plain.exposed.items() if self.nodes[i] in starts)

    def _added(self, seconds: float, kinds: list[list[Region]]) -> tuple[float, list[tuple[Region, Parts]]]:
        """One kind of region after the other, where it makes the step shorter: what is in chunks costs work, so that
        few may be better than all. Then single ones, as where memory is full at a backward's begin.
        """
        now: list[tuple[Region, Parts]] = []
        failed = 0
        for k, same in enumerate([*kinds, *self._single(kinds)]):
            is_single = k >= len(kinds)
            if is_single and failed == FEW:
                break
            if any(set(r.cuts) & set(s.cuts) for r in same for s, _ in now):
                continue
            shortest, best = math.inf, now
            for parts in same[0].most_parts(PARTS[:2]):
                trial = [*now, *((r, parts) for r in same)]
                result = self.way(trial, below=seconds * (1 - 1e-3), most_work=self._most())
                if result is not None and result < shortest:
                    shortest, best = result, trial
                if result is not None and result >= seconds * (1 - 1e-3):
                    failed += is_single
                    break  # nor will more chunks pay
            if shortest < seconds * (1 - 1e-3):
                seconds, now, failed = shortest, best, 0
        return seconds, now

    def _single(self, kinds: list[list[Region]]) -> list[list[Region]]:
        """Regions that have others like them and are exposed, each alone, the most exposed first."""
        if self.within is not None:
            return []
        results = [r for same in kinds if len(same) > 1 for r in same]
        exposed = [(self._exposed(r), k) for k, r in enumerate(results)]
        least = GAIN / 2 * self.plain.seconds
        return [[results[k]] for seconds, k in sorted(exposed, key=lambda e: -e[0]) if seconds > least]

    def _refined(self, seconds: float, chosen: list[tuple[Region, Parts]]) -> tuple[float, list[tuple[Region, Parts]]]:
        """Each kind of region by itself: another number of chunks, or none."""
        now = list(chosen)
        for same in alike([r for r, _ in chosen]):
            for parts in (1, *same[0].most_parts((*PARTS, *TAPERED))):
                trial = [(r, parts if any(r is s for s in same) else p) for r, p in now]
                if [p for _, p in trial] == [p for _, p in now]:
                    continue
                result = self.way([(r, p) for r, p in trial if p != 1])
                if result is not None and result < seconds * (1 - 1e-4):
                    seconds, now = result, trial
        return seconds, [(r, p) for r, p in now if p != 1]

    def way(
        self, chosen: list[tuple[Region, Parts]], *, below: float = math.inf, most_work: float = math.inf
    ) -> float | None:
        """Modelled step with these in chunks; every way is tried once. ``below``, ``most_work``: see :meth:`step`."""
        key = frozenset((next(iter(r.cuts)), len(r.cuts), parts) for r, parts in chosen)
        if key not in self.tried or self.tried[key][0] < self.effort:
            if self.within is not None and self.size >= self.within:
                return None
            self.tried[key] = (self.effort, self._simulated(chosen, min(below, self.plain.seconds), most_work))
        return self.tried[key][1]

    def _simulated(self, chosen: list[tuple[Region, Parts]], below: float, most_work: float) -> float | None:
        def edit(copy: fx.GraphModule, at: Callable[[fx.Node], fx.Node]) -> None:
            put = Draft(copy, self.values)
            for region, parts in chosen:
                compute_in_chunks(
                    copy,
                    Region(
                        {at(n): c for n, c in region.cuts.items()},
                        {at(n): {at(s): c for s, c in need.items()} for n, need in region.needs.items()},
                    ),
                    parts,
                    put,
                )

        if not chosen:
            return self.plain.seconds
        if self.busiest_link(chosen) >= min(below * (1 + 1e-9), most_work):
            return None
        return self.step(edit, below=below, most_work=most_work)

    def busiest_link(self, chosen: list[tuple[Region, Parts]]) -> float:
        """Seconds for which the busiest link is busy with these in chunks: no step is shorter, and no graph need be
        made to know it.
        """
        busy = self.work.busy()
        busy.pop(COMPUTE)
        for region, parts in chosen:
            each = shares(parts)
            for start in region.starts:
                if isinstance(region.cuts[start], ChunkSpec):
                    task = self.work.tasks[self.numbers[start]]
                    chunks = (transfer(start, self.hardware, (share, sum(each))).seconds for share in each)
                    busy[task.resource] += float(sum(chunks)) - task.seconds
        return max(busy.values(), default=0.0)

    def step(
        self,
        edit: Callable[[fx.GraphModule, Callable[[fx.Node], fx.Node]], None],
        below: float = math.inf,
        most_work: float = math.inf,
    ) -> float | None:
        """Modelled step of an edited copy of the graph; None where memory does not allow it, infinite where no order
        of it can be shorter than ``below``.

        Args:
            edit: called with the copy, and with what gives the copy's node for the graph's.
            below: seconds; where a bound is not under them no order is searched, as where chunks add more launches
                than there is time.
            most_work: seconds; nor where one stream alone has as much to do.
        """
        copy = fx_graph.copy_graph(self.gm)
        nodes = list(copy.graph.nodes)
        edit(copy, lambda n: nodes[self.places[n]])
        self.size += len(copy.graph.nodes)
        work = self.tasks(copy).tasks
        if max(work.busy().values()) >= most_work or work.highest_bound >= below:
            return math.inf
        order = leaner(work, self.limit)
        if order is None:
            return None
        work = reorder(work, order)
        allowance = self.limit - simulate(work).peak
        if self.effort > QUICK * len(work):
            seconds = schedule(work, allowance=allowance, work=QUICK * len(work)).seconds
            if seconds > self._quick_plain() * (1 - NEAR):
                return seconds
        return schedule(work, allowance=allowance, work=self.effort).seconds

    def _quick_plain(self) -> float:
        """Modelled step without chunks where each task is placed QUICK times."""
        if self.quick is None:
            quick = schedule(self.work, allowance=self.allowance, work=QUICK * len(self.work))
            self.quick, self.plain = quick.seconds, min(self.plain, quick, key=lambda t: t.seconds)
        return self.quick

    def tasks(self, gm: fx.GraphModule) -> GraphTasks:
        options = self.context.options
        return cached_tasks(
            gm,
            self.context if gm is self.gm else None,
            lambda: cost_of(gm, self.hardware, options.codegen == "inductor"),
            self.owned,
        )


def alike(results: list[Region]) -> list[list[Region]]:
    """Regions that are alike, as those of repeated layers are."""
    kinds: dict[Any, list[Region]] = {}
    for r in results:
        kinds.setdefault(
            tuple((str(n.target), str(c), str(getattr(n.meta["val"], "shape", ""))) for n, c in r.cuts.items()), []
        ).append(r)
    return list(kinds.values())
