"""``overlap.schedule``: collectives start as early and are waited for as late as data and memory allow.

Only the order of nodes changes, and only to orders that respect data, writes in place, random numbers and effects (see
graph.py), so results are bitwise the same. Memory: never over the peak of the graph as it came plus the allowance
(option "overlap_memory", default 0).
"""

from __future__ import annotations

import torch.fx as fx

from mindspeed_fx.graph.collectives import is_blocking, is_start
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.overlap.model.costs import FUSED, cost_of, deciding_device
from mindspeed_fx.passes.overlap.model.reasons import reasons, share_hidden
from mindspeed_fx.passes.overlap.model.simulator import Timeline, simulate
from mindspeed_fx.passes.overlap.model.task_graph import LARGE, GraphTasks, cached_tasks, saved_activation
from mindspeed_fx.passes.overlap.scheduler.local_search import schedule
from mindspeed_fx.passes.overlap.scheduler.rank_agreement import check_across_ranks
from mindspeed_fx.report.timeline import chrome_trace, picture

NAME = "overlap.schedule"
WORTH = 1e-3
"""Share of the step that must be exposed for the search that says what memory would change."""


@register(NAME)
def overlap_schedule(gm: fx.GraphModule, context: Context) -> PassReport:
    """Orders collectives and compute so that communication runs under compute, within memory."""
    report = PassReport(NAME)
    for node in gm.graph.nodes:
        if is_blocking(node) and FUSED not in node.meta:
            report.skipped.append(
                skip(
                    str(node.target),
                    node,
                    "it starts and ends in one operator; only functional collectives can be overlapped",
                )
            )
    if not any(is_start(n) for n in gm.graph.nodes):
        return report.note_reason("no functional collectives")
    hardware, why = deciding_device(context)
    if hardware is None:
        starts = [n for n in gm.graph.nodes if is_start(n)]
        report.skipped += [skip(str(n.target), n, why) for n in starts]
        _check(report, gm, context)
        return report
    work = cached_tasks(
        gm,
        context,
        lambda: cost_of(gm, hardware, context.options.codegen == "inductor"),
        saved_activation if context.side == "backward" else None,
    )
    context.overlap.tasks = (None, None)
    before = simulate(work.tasks)
    limit = context.overlap.limit if context.overlap.limit is not None else before.peak + context.options.overlap_memory
    after = _cached_schedule(context, gm, work, limit) or schedule(
        work.tasks,
        allowance=max(limit - before.peak, 0),
        work=None if len(work.tasks) <= LARGE else 2 * len(work.tasks),
    )
    if after.order != before.order:
        work.apply(after.order)
    _tell(report, work, before, after)
    _check(report, gm, context)
    return report


def _check(report: PassReport, gm: fx.GraphModule, context: Context) -> None:
    for group, digest in check_across_ranks(gm, context.side, context.options.deciding()).items():
        report.notes.append(f'group "{group}": order of collectives {digest}')


def _cached_schedule(context: Context, gm: fx.GraphModule, work: GraphTasks, limit: int) -> Timeline | None:
    """The schedule of a large graph that an earlier pass of this family worked out, if the graph is still the same."""
    (nodes, order), context.overlap.order = context.overlap.order, ((), ())
    if len(gm.graph.nodes) <= LARGE or nodes != work.nodes:
        return None
    result = simulate(work.tasks, order)
    return result if result.peak <= limit else None


def _tell(report: PassReport, work: GraphTasks, before: Timeline, after: Timeline) -> None:
    graph = work.tasks
    place = {i: k for k, i in enumerate(after.order)}
    for k, i in enumerate(before.order):
        if graph.tasks[i].resource != "compute" and (
            place[i] != k or after.exposed.get(i, 0.0) != before.exposed.get(i, 0.0)
        ):
            report.rewrites.append(
                site(
                    f"{graph.tasks[i].kind}: exposed {before.exposed.get(i, 0.0) * 1e3:.3f} -> "
                    f"{after.exposed.get(i, 0.0) * 1e3:.3f} ms",
                    work.nodes[i],
                )
            )
    # what memory costs is only worth a second search when something is exposed
    unlimited = (
        schedule(graph, allowance=None, work=len(graph)) if after.exposed_seconds > WORTH * after.seconds else None
    )
    for i, why in reasons(after, unlimited).items():
        report.skipped.append(skip(graph.tasks[i].kind, work.nodes[i], why))
    report.notes.append(
        f"modelled step {before.seconds * 1e3:.3f} -> {after.seconds * 1e3:.3f} ms (bound {graph.bound() * 1e3:.3f}), "
        "exposed communication "
        f"{before.exposed_seconds * 1e3:.3f} -> {after.exposed_seconds * 1e3:.3f} ms, {_shares(after)}peak "
        f"{before.peak / 2**20:.1f} -> {after.peak / 2**20:.1f} MiB"
    )
    both = {"before": before, "after": after}
    report.files["timeline.json"] = chrome_trace(both)
    report.files["timeline.svg"] = picture(both)


def _shares(after: Timeline) -> str:
    share = share_hidden(after)
    return (
        ""
        if share is None
        else f"{share:.1%} of what could be hidden "
        f"({(sum(after.graph.busy().values()) - after.graph.highest_bound) * 1e3:.3f} ms) is, "
    )
