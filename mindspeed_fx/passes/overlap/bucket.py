"""``overlap.bucket``: small collectives of one kind and group become one, where the model says that the step gets
shorter.

Members are handed over as a list (``all_reduce_coalesced`` and its like): nothing is copied, and every tensor is
reduced as it would be alone, so results are bitwise the same for any number of ranks. (The reduction of one
concatenated buffer
is not: a ring sums an element over the ranks in an order that depends on where in the buffer it lies.)

Gradients' all_reduce and reduce_scatter, parameters' all_gather: whatever does not depend on each other. The size of a
bucket is the size at which launch and latency are :data:`OVERHEAD` of a transfer; half, twice and four times that are
simulated too, and the best schedule wins, with the peak memory of the graph as it came plus the allowance as limit.
"""

from __future__ import annotations

import operator
from collections import Counter

import torch
import torch.fx as fx

from mindspeed_fx.compat.distributed import writes_again_at_each_wait
from mindspeed_fx.graph.collectives import group_of, is_start, kind
from mindspeed_fx.graph.match import argument
from mindspeed_fx.graph.recompile import recompile
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.overlap.chunking.chunk import CHUNK
from mindspeed_fx.passes.overlap.model.costs import cost_of, deciding_device, moved_bytes, transfer
from mindspeed_fx.passes.overlap.model.simulator import simulate
from mindspeed_fx.passes.overlap.model.task_graph import GraphTasks, cached_tasks, saved_activation
from mindspeed_fx.passes.overlap.scheduler.buckets import Candidate, acyclic, buckets, merge_buckets
from mindspeed_fx.passes.overlap.scheduler.local_search import schedule
from mindspeed_fx.passes.overlap.step import join_steps

NAME = "overlap.bucket"
OVERHEAD = 0.05
"""Share of a transfer's time that launch and latency may be; larger buckets gain less than they delay."""
LARGE = 5000
"""Tasks from which only the middle bucket size is tried (0.1 s of 2026-11-22-overlap_time.txt)."""

_c10d = torch.ops._c10d_functional
_COALESCED = {
    _c10d.all_reduce.default: _c10d.all_reduce_coalesced.default,
    _c10d.all_gather_into_tensor.default: _c10d.all_gather_into_tensor_coalesced.default,
    _c10d.reduce_scatter_tensor.default: _c10d.reduce_scatter_tensor_coalesced.default,
}


@register(NAME)
def overlap_bucket(gm: fx.GraphModule, context: Context) -> PassReport:
    """Small collectives of one kind and group become one, where the model says it pays."""
    report = PassReport(NAME)
    starts = [n for n in gm.graph.nodes if is_start(n) and CHUNK not in n.meta]
    if sum(n.target in _COALESCED for n in starts) < 2:
        return report.note_reason("fewer than two collectives that could be joined")
    hardware, why = deciding_device(context)
    if hardware is None:
        report.skipped += [skip(kind(n), n, why) for n in starts]
        return report
    work = cached_tasks(
        gm,
        context,
        lambda: cost_of(gm, hardware, context.options.codegen == "inductor"),
        saved_activation if context.side == "backward" else None,
    )
    alone = [n for n in starts if n.target in _COALESCED and writes_again_at_each_wait(group_of(n), kind(n))]
    report.skipped += [skip(kind(n), n, "gloo writes the results of joined ones again at each wait") for n in alone]
    members = set(starts).difference(alone)
    candidates = [
        _candidate(i, n, hardware) for i, n in enumerate(work.nodes) if n in members and n.target in _COALESCED
    ]
    peak = simulate(work.tasks).peak
    if context.overlap.limit is None:
        context.overlap.limit = peak + context.options.overlap_memory
    limit = context.overlap.limit
    chosen, told = choose(work, candidates, max(limit - peak, 0))
    report.notes.append(told)
    inside = {c.task for bucket in chosen for c in bucket}
    if chosen:
        work.apply(
            [i for group in merge_buckets(work.tasks, chosen)[1] for i in group]
        )  # every member beside the others
        for bucket in chosen:
            nodes = [work.nodes[c.task] for c in bucket]
            new = _coalesce(gm, nodes)
            report.rewrites.append(
                site(f"{kind(new)} of {len(nodes)}, {sum(c.bytes for c in bucket) / 2**20:.2f} MiB", nodes[0], nodes)
            )
        report.rewrites += [
            site(f"one step of {len(step.args[0])} parameters", step, [step]) for step in join_steps(gm)
        ]
        recompile(gm)
    alike = Counter(c.key for c in candidates)
    for c in candidates:
        if c.task not in inside:
            why = (
                "no other collective of its kind, group and type is independent of it"
                if alike[c.key] == 1
                else "the model finds no shorter step with it in a bucket"
            )
            report.skipped.append(skip(c.key[0], work.nodes[c.task], why))
    return report


def choose(work: GraphTasks, candidates: list[Candidate], allowance: int) -> tuple[list[list[Candidate]], str]:
    """The buckets with the shortest simulated step, and a sentence about it."""
    graph = work.tasks
    sizes = []
    for times in (1,) if len(graph) > LARGE else (0.5, 1, 2, 4):
        results = [
            b
            for key in {c.key: None for c in candidates}
            for b in buckets(
                graph,
                [c for c in candidates if c.key == key],
                int(times * _cap([c for c in candidates if c.key == key])),
            )
        ]
        if results := acyclic(graph, sorted(results, key=lambda b: b[0].task)):
            sizes.append(results)
    if not sizes:
        return [], "no two of them are small and independent of each other"
    limit = simulate(graph).peak + allowance
    merged = [(results, merge_buckets(graph, results)[0]) for results in sizes]
    fitting = [(results, together, peak) for results, together in merged if (peak := simulate(together).peak) <= limit]
    refused = len(sizes) - len(fitting)
    over = f"{refused} sizes would raise peak memory over {limit / 2**20:.1f} MiB" if refused else ""
    if not fitting:
        return [], over
    effort = len(graph) if len(graph) > LARGE else max(4 * len(graph), min(16 * len(graph), 30_000))
    base = schedule(graph, allowance=allowance, work=effort).seconds
    best, seconds = [], base
    seen = []  # several sizes may come to the same buckets
    for results, together, peak in fitting:
        if (members := [[c.task for c in bucket] for bucket in results]) in seen:
            continue
        seen.append(members)
        step = schedule(together, allowance=limit - peak, work=effort).seconds
        if step < seconds * (1 - 1e-6):
            best, seconds = results, step
    told = f"modelled step {base * 1e3:.3f} ms without buckets, {seconds * 1e3:.3f} ms with {len(best)}"
    return best, "; ".join(filter(None, (told, over)))


def _cap(candidates: list[Candidate]) -> int:
    """Bytes at which launch and latency are OVERHEAD of the time."""
    fixed = max(c.fixed for c in candidates)
    rate = sum(c.bytes for c in candidates) / max(sum(c.moving for c in candidates), 1e-30)
    return int(fixed * (1 - OVERHEAD) / OVERHEAD * rate)


def _candidate(i: int, node: fx.Node, hardware) -> Candidate:
    modelled = transfer(node, hardware)
    value = node.meta.get("val")
    key = (kind(node), group_of(node), str(argument(node, "reduce_op")), str(getattr(value, "dtype", "")))
    return Candidate(i, key, moved_bytes(node), float(modelled.launch + modelled.alpha), float(modelled.beta))


def _coalesce(gm: fx.GraphModule, starts: list[fx.Node]) -> fx.Node:
    """One collective for ``starts``, at the place of the last of them."""
    last = starts[-1]
    target = _COALESCED[last.target]
    with gm.graph.inserting_after(last):
        new = gm.graph.call_function(target, ([s.args[0] for s in starts], *last.args[1:]), dict(last.kwargs))
    new.meta = {**{k: v for k, v in last.meta.items() if k != "val"}, "val": [s.meta["val"] for s in starts]}
    at = new
    for n, s in enumerate(starts):
        with gm.graph.inserting_after(at):
            at = gm.graph.call_function(operator.getitem, (new, n))
        at.meta = dict(s.meta)
        s.replace_all_uses_with(at)
        gm.graph.erase_node(s)
    return new
