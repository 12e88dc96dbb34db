"""``overlap.decompose``: a product and the collective next to it in chunks, one chunk's communication under another's product.

all_gather and the products that read it, products and the reduce_scatter or all_reduce they go into (MindSpeed's CoC in
script mode; Wang et al. 2023, "Overlap communication with dependent computation via decomposition"), forward and backward,
whoever put the collectives there. A weight gradient is added up over the chunks that its input gradient's collective moves,
and what is read whole is put together from them: nothing is gathered twice. See region.py for how far chunks reach, cuts.py for which rows a chunk has:
a rank keeps the rows it had.

There is no ring of sends: on the networks of the cost tables an all_gather uses every link of a mesh at once and a port of a
switch both ways, so a ring of one direction or of two moves the same bytes over fewer links or with more launches.

Every element is the same dot product and the same sum over ranks as before; but a library may sum K in another order for
fewer rows, a ring may begin an element's sum at another rank, and gradients of weights become sums over chunks, 0 + 1 + ...
So the pass is not exact, and off under ``torch.use_deterministic_algorithms``.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch
import torch.fx as fx

from mindspeed_fx import compat
from mindspeed_fx.cost.hardware import Hardware
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.deferred import uncollected
from mindspeed_fx.passes.overlap.chunk import chunked
from mindspeed_fx.passes.overlap.collectives import is_start, kind
from mindspeed_fx.passes.overlap.cuts import Draft, Parts
from mindspeed_fx.passes.overlap.frugal import leaner, reordered
from mindspeed_fx.passes.overlap.graph import LARGE as OF_MANY
from mindspeed_fx.passes.overlap.graph import GraphTasks, priced, saved_activation
from mindspeed_fx.passes.overlap.improve import schedule
from mindspeed_fx.passes.overlap.price import cost_of, device
from mindspeed_fx.passes.overlap.region import KINDS, REACHES, Region, regions, sized
from mindspeed_fx.passes.overlap.schedule import LIMIT, ORDER
from mindspeed_fx.passes.overlap.simulate import simulate
from mindspeed_fx.passes.overlap.tasks import COMPUTE

NAME = "overlap.decompose"
PARTS = (2, 4, 8)
TAPERED = ((1, 3, 3, 1), (1, 2, 2, 2, 1), (1, 3, 4), (4, 3, 1))
"""Chunks of unequal sizes: before the first and after the last one's collective nothing of its region can run, so that these two had better be small."""
GAIN = 0.01
"""Share of the modelled step that chunks must save: more launches make the host busier, which the model does not see."""
INEXACT = "torch.use_deterministic_algorithms is on, and chunks are equal to the whole within rounding only"
SURE = 60_000
"""Tasks that the search may place where whole and chunks are compared. With a quarter of that the step of eight Llama layers comes out 6 % longer
than with all, which hides what chunks gain; more finds nothing shorter."""
LARGE = 3000
"""Nodes from which only pipelines of two and of four chunks are tried."""


@register(NAME, stage="partitioned", level=2, provides=("decomposed",), after=("split", "mc2", "stepped"))
def overlap_decompose(gm: fx.GraphModule, context: Context) -> PassReport:
    """Products and their collectives in chunks that run under each other, where the model says it pays."""
    report = PassReport(NAME)
    starts = [n for n in gm.graph.nodes if is_start(n) and kind(n) in KINDS]
    if not starts:
        return report.because("no collective that can be cut")
    hardware, why = device(context.options)
    if torch.are_deterministic_algorithms_enabled():
        why, hardware = INEXACT, None
    elif hardware is None:
        why = f"no cost model: {why}"
    if hardware is None:
        report.skipped += [skip(kind(n), n, why) for n in starts]
        return report
    with uncollected(len(gm.graph.nodes) > OF_MANY):
        tried = Trials(gm, context, hardware)
    gm.meta[LIMIT] = tried.limit
    full = tried.full()
    if full is not None:
        gm.meta[ORDER] = (tried.nodes, tried.plain.order)
        report.skipped += [skip(kind(n), n, full) for n in starts]
        return report.because(f"modelled step {tried.plain.seconds * 1e3:.3f} ms whole; {full}")
    found = {reach: list(disjoint(starts, reach)) for reach in tried.reaches}
    best = tried.best(found)
    report.notes.append(tried.told)
    inside: set[fx.Node] = set()
    for region, parts in best:
        inside |= set(region.starts)
        label = " and ".join(dict.fromkeys(f"{kind(s)}" for s in region.starts))
        report.rewrites.append(site(f"{label} with {len(region.products)} products in {_told(parts)}", region.starts[0], list(region.cuts)))
    cuttable = {s for rs in found.values() for r in rs for s in r.starts}
    for n in starts:
        if n not in inside:
            report.skipped.append(skip(kind(n), n, _why(n, cuttable)))
    if not best:
        gm.meta[ORDER] = (tried.nodes, tried.plain.order)
    for region, parts in best:
        chunked(gm, region, parts)
    if best:
        work = tried.tasks(gm)
        work.apply(leaner(work.tasks, tried.limit) or range(len(work.tasks)))
    return report


def disjoint(starts: list[fx.Node], reach: str) -> Iterator[Region]:
    """Regions that share no node, the first along each collective's best dimension that can be cut."""
    taken: set[fx.Node] = set()
    for start in starts:
        if start in taken:
            continue
        for region in regions(start, reach):
            if region.most_parts(PARTS) and not taken & set(region.cuts):
                taken |= set(region.cuts)
                yield region
                break


def _told(parts: Parts) -> str:
    return f"{parts} chunks" if isinstance(parts, int) else f"{len(parts)} chunks of {':'.join(map(str, parts))}"


def _why(start: fx.Node, cuttable: set[fx.Node]) -> str:
    if start in cuttable:
        return "the model finds no shorter step with it in chunks"
    if not sized(start) or not sized(start.args[0]):
        return "its sizes are known at run time only (dynamic shapes)"
    grown = [r for reach in REACHES for r in regions(start, reach)]
    if grown:
        shape = tuple((start.meta["val"] if kind(start) == "reduce_scatter_tensor" else start.args[0].meta["val"]).shape)
        return f"its shape {shape} has no dimension that {PARTS[0]} chunks divide evenly" if not any(r.most_parts(PARTS) for r in grown) else "its chunks would share nodes with another collective's"
    beside = {"all_gather_into_tensor": "no product of matrices reads its rows", "all_to_all_single": "no product of matrices works on its rows, or its splits are not equal"}
    return beside.get(kind(start), "what it reduces is made by no product of matrices, row by row")


class Trials:
    """Steps with chunks, modelled."""

    def __init__(self, gm: fx.GraphModule, context: Context, hardware: Hardware):
        self.gm, self.context, self.hardware = gm, context, hardware
        self.places = {n: k for k, n in enumerate(gm.graph.nodes)}
        made = self.tasks(gm)
        self.nodes, self.work = made.nodes, made.tasks
        self.limit = simulate(self.work).peak + context.options.overlap_memory
        self.effort = max(min(96 * len(self.work), SURE), 6 * len(self.work))  # half of it is for an order, the same from the end, and again
        self.plain = schedule(self.work, allowance=context.options.overlap_memory, work=self.effort)
        self.reaches = REACHES if len(self.places) <= LARGE else REACHES[1:]
        self.told, self.seconds, self.values = "", self.plain.seconds, {}
        self.tried: dict[frozenset, tuple[int, float | None]] = {}

    def full(self) -> str | None:
        """Why no way of cutting can be worth it; None where one may: chunks add work to every stream, and take none away."""
        stream, busy = max(self.work.busy().items(), key=lambda item: item[1])
        if self.plain.seconds * (1 - GAIN) > busy:
            return None
        return f"no chunks can save {GAIN:.0%}: {'compute' if stream == COMPUTE else f'link {stream}'} alone takes {busy / max(self.plain.seconds, 1e-30):.1%} of the step"

    def best(self, found: dict[str, list[Region]]) -> list[tuple[Region, Parts]]:
        """Regions and their numbers of chunks with the shortest step, :attr:`seconds`; [] when none saves GAIN."""
        seconds, chosen = self.plain.seconds, []
        if self.full() is None:
            for reach in self.reaches:
                classes = _classes(found[reach])
                for parts in PARTS if len(self.places) <= LARGE else PARTS[:2]:
                    now = self._step(made := [(r, parts) for r in found[reach] if parts in r.most_parts(PARTS)]) if classes else None
                    if now is not None and now < seconds:
                        seconds, chosen = now, made
            if len(self.places) <= LARGE:
                kinds = [same for reach in REACHES for same in _classes(found[reach])]
                kinds += [[r] for same in kinds if len(same) > 1 for r in same if self._exposed(r) > GAIN / 2 * self.plain.seconds]  # where memory is full, as at a backward's begin
                ends = [self._refined(*self._added(self.plain.seconds, [], kinds))]
                if chosen:
                    ends.append(self._refined(seconds, chosen))
                seconds, chosen = min(ends, key=lambda end: end[0])
        if chosen:  # a quick search may find less for one of the two
            self.effort = SURE
            self.plain = min(self.plain, schedule(self.work, allowance=self.context.options.overlap_memory, work=SURE), key=lambda t: t.seconds)
            seconds = min(seconds, self._step(chosen) or seconds)
        if seconds > self.plain.seconds * (1 - GAIN):
            seconds, chosen = self.plain.seconds, []
        self.seconds = seconds
        self.told = f"modelled step {self.plain.seconds * 1e3:.3f} ms whole, {seconds * 1e3:.3f} ms with {len(chosen)} regions in chunks ({len(self.tried)} ways tried; less than {GAIN:.0%} is not taken)"
        return chosen

    def _exposed(self, region: Region) -> float:
        """Seconds for which the region's collectives are exposed without chunks."""
        starts = set(region.starts)
        return sum(seconds for i, seconds in self.plain.exposed.items() if self.nodes[i] in starts)

    def _added(self, seconds: float, chosen: list[tuple[Region, Parts]], kinds: list[list[Region]]) -> tuple[float, list[tuple[Region, Parts]]]:
        """One kind of region after the other, where it makes the step shorter: what is in chunks costs work, so that few may be better than all."""
        now = list(chosen)
        for same in kinds:
            if any(set(r.cuts) & set(s.cuts) for r in same for s, _ in now):
                continue
            tried = [(found, parts) for parts in same[0].most_parts(PARTS[:2]) if (found := self._step([*now, *((r, parts) for r in same)])) is not None]
            if tried and min(tried)[0] < seconds * (1 - 1e-3):
                seconds, parts = min(tried)
                now += [(r, parts) for r in same]
        return seconds, now

    def _refined(self, seconds: float, chosen: list[tuple[Region, Parts]]) -> tuple[float, list[tuple[Region, Parts]]]:
        """Each kind of region by itself: another number of chunks, or none."""
        now = list(chosen)
        for same in _classes([r for r, _ in chosen]):
            for parts in (1, *same[0].most_parts((*PARTS, *TAPERED))):
                trial = [(r, parts if any(r is s for s in same) else p) for r, p in now]
                if [p for _, p in trial] == [p for _, p in now]:
                    continue
                found = self._step([(r, p) for r, p in trial if p != 1])
                if found is not None and found < seconds * (1 - 1e-4):
                    seconds, now = found, trial
        return seconds, [(r, p) for r, p in now if p != 1]

    def _step(self, chosen: list[tuple[Region, Parts]]) -> float | None:
        """Modelled step with these in chunks; every way is tried once."""
        key = frozenset((next(iter(r.cuts)), len(r.cuts), parts) for r, parts in chosen)
        if key not in self.tried or self.tried[key][0] < self.effort:
            self.tried[key] = (self.effort, self._simulated(chosen))
        return self.tried[key][1]

    def _simulated(self, chosen: list[tuple[Region, Parts]]) -> float | None:
        def edit(copy: fx.GraphModule, at: Callable[[fx.Node], fx.Node]) -> None:
            put = Draft(copy, self.values)
            for region, parts in chosen:
                chunked(copy, Region({at(n): c for n, c in region.cuts.items()}, {at(n): {at(s): c for s, c in need.items()} for n, need in region.needs.items()}), parts, put)

        return self.step(edit) if chosen else self.plain.seconds

    def step(self, edit: Callable[[fx.GraphModule, Callable[[fx.Node], fx.Node]], None]) -> float | None:
        """Modelled step of an edited copy of the graph; None where memory does not allow it.

        Args:
            edit: called with the copy, and with what gives the copy's node for the graph's.
        """
        copy = compat.copy_graph(self.gm)
        nodes = list(copy.graph.nodes)
        edit(copy, lambda n: nodes[self.places[n]])
        work = self.tasks(copy).tasks
        order = leaner(work, self.limit)
        if order is None:
            return None
        work = reordered(work, order)
        return schedule(work, allowance=self.limit - simulate(work).peak, work=self.effort).seconds

    def tasks(self, gm: fx.GraphModule) -> GraphTasks:
        options = self.context.options
        return priced(gm, lambda: cost_of(gm, self.hardware, options.codegen == "inductor"), saved_activation if self.context.side == "backward" else None)


def _classes(found: list[Region]) -> list[list[Region]]:
    """Regions that are alike, as those of repeated layers are."""
    alike: dict[Any, list[Region]] = {}
    for r in found:
        alike.setdefault(tuple((str(n.target), str(c), str(getattr(n.meta["val"], "shape", ""))) for n, c in r.cuts.items()), []).append(r)
    return list(alike.values())
