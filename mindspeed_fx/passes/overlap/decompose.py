"""``overlap.decompose``: a product and the collective next to it in chunks, one chunk's communication under another's
product.

all_gather and the products that read it, products and the reduce_scatter or all_reduce they go into (MindSpeed's CoC in
script mode; Wang et al. 2023, "Overlap communication with dependent computation via decomposition"), forward and
backward, whoever put the collectives there. A weight gradient is added up over the chunks that its input gradient's
collective moves, and what is read whole is put together from them: nothing is gathered twice. See region.py for how far
chunks reach, cuts.py for which rows a chunk has: a rank keeps the rows it had.

There is no ring of sends: on the networks of the cost tables an all_gather uses every link of a mesh at once and a port
of a switch both ways, so a ring of one direction or of two moves the same bytes over fewer links or with more launches.

Every element is the same dot product and the same sum over ranks as before; but a library may sum K in another order
for fewer rows, a ring may begin an element's sum at another rank, and gradients of weights become sums over chunks, 0 +
1 + ... So the pass is not exact, and off under ``torch.use_deterministic_algorithms``.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.fx as fx

from mindspeed_fx.graph.collectives import is_start, kind
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.overlap.chunking.chunk import compute_in_chunks
from mindspeed_fx.passes.overlap.chunking.chunk_search import PARTS, Trials
from mindspeed_fx.passes.overlap.chunking.chunk_spec import Draft, Parts
from mindspeed_fx.passes.overlap.chunking.region import KINDS, REACHES, Region, has_static_sizes, regions
from mindspeed_fx.passes.overlap.chunking.windows import best, surroundings
from mindspeed_fx.passes.overlap.model.costs import deciding_device
from mindspeed_fx.passes.overlap.model.task_graph import LARGE
from mindspeed_fx.passes.overlap.scheduler.min_memory_order import leaner

NAME = "overlap.decompose"
INEXACT = "torch.use_deterministic_algorithms is on, and chunks are equal to the whole within rounding only"


@register(NAME)
def overlap_decompose(gm: fx.GraphModule, context: Context) -> PassReport:
    """Products and their collectives in chunks that run under each other, where the model says it pays."""
    report = PassReport(NAME)
    starts = [n for n in gm.graph.nodes if is_start(n) and kind(n) in KINDS]
    if not starts:
        return report.note_reason("no collective that can be cut")
    hardware, why = deciding_device(context)
    if torch.are_deterministic_algorithms_enabled():
        why, hardware = INEXACT, None
    if hardware is None:
        report.skipped += [skip(kind(n), n, why) for n in starts]
        return report
    large = len(gm.graph.nodes) > LARGE
    tried = Trials(gm, context, hardware)
    context.overlap.limit = tried.limit
    full = tried.full()
    if full is not None:
        context.overlap.order = (tried.nodes, tried.plain.order)
        report.skipped += [skip(kind(n), n, full) for n in starts]
        return report.note_reason(f"modelled step {tried.plain.seconds * 1e3:.3f} ms whole; {full}")
    read = functools.cache(regions)  # of the graph as it is now
    result = best(tried, starts, read)
    report.notes.append(tried.told)
    inside: set[fx.Node] = set()
    for region, parts in result.regions:
        inside |= set(region.starts)
        label = " and ".join(dict.fromkeys(f"{kind(s)}" for s in region.starts))
        report.rewrites.append(
            site(
                f"{label} with {len(region.products)} products in {_describe(parts)}",
                region.starts[0],
                list(region.cuts),
            )
        )
    known: dict[Any, str] = {}
    for n in starts:
        if n not in inside:
            if (why := result.untried.get(n)) is None:
                key = surroundings(n) if result.by_windows else n  # reading each layer's for its reason takes long
                why = known[key] = known.get(key) or _why(n, result.cuttable, read)
            report.skipped.append(skip(kind(n), n, why))
    if not result.regions:
        context.overlap.order = (tried.nodes, tried.plain.order)
    put = Draft(gm, tried.values) if large else None
    for region, parts in result.regions:
        compute_in_chunks(gm, region, parts, put)
    if result.regions:
        work = tried.tasks(gm)
        work.apply(leaner(work.tasks, tried.limit) or range(len(work.tasks)))
    return report


def _describe(parts: Parts) -> str:
    return f"{parts} chunks" if isinstance(parts, int) else f"{len(parts)} chunks of {':'.join(map(str, parts))}"


def _why(start: fx.Node, cuttable: set[fx.Node], read: Callable[[fx.Node, str], list[Region]]) -> str:
    if start in cuttable:
        return "the model finds no shorter step with it in chunks"
    if not has_static_sizes(start) or not has_static_sizes(start.args[0]):
        return "its sizes are known at run time only (dynamic shapes)"
    is_grown = False
    for region in (r for reach in REACHES for r in read(start, reach)):  # reading one takes long: the first that serves
        is_grown = True
        if region.most_parts(PARTS):
            return "its chunks would share nodes with another collective's"
    if is_grown:
        whole = start if kind(start) == "reduce_scatter_tensor" else start.args[0]
        shape = tuple(whole.meta["val"].shape)
        return f"its shape {shape} has no dimension that {PARTS[0]} chunks divide evenly"
    other = {
        "all_gather_into_tensor": "no product of matrices reads its rows",
        "all_to_all_single": "no product of matrices works on its rows, or its splits are not equal",
    }
    return other.get(kind(start), "what it reduces is made by no product of matrices, row by row")
