"""``memory_budget`` in bytes, or "min": the step fits, at little extra time.

A price per saved byte gives one plan (:mod:`cut`), exactly optimal for that price; a rising price walks along the lower
hull of time against memory. The first plan on it whose peak (:mod:`peak`) fits is taken, and then, from the last value
backwards, whatever its cheaper neighbour saved is saved again as long as the peak still fits: between two points of the
hull, layers are decided one by one. Times are the cost model's (:mod:`mindspeed_fx.cost`). Deterministic, so that all
ranks of one model find the same plan.

The peak counts everything the graph holds at once: its inputs (parameters, batch), activations, gradients. Optimizer
states and other graphs of the model are not in it.
"""

from __future__ import annotations

import math

import torch.fx as fx

from mindspeed_fx import compat_partition
from mindspeed_fx.cost.hardware import Hardware, detect, hardware
from mindspeed_fx.options import OptionError
from mindspeed_fx.passes.base import Context, PassReport, module_path, register, site
from mindspeed_fx.passes.recompute.cut import cheapest
from mindspeed_fx.passes.recompute.peak import Peak, Step
from mindspeed_fx.passes.recompute.pointwise import prices
from mindspeed_fx.passes.recompute.tape import Operation, Tape, in_memory, record, saved_names

NAME = "recompute.budget"

PRICES = 24
"""Points tried on the hull, in equal ratios between the cheapest recomputation and the dearest."""

UNSEEN = 1 / 32
"""Part of a budget kept free for workspaces of other libraries' kernels, which :mod:`peak` does not see (measured: up to 3 %
of a small Llama's step on cpu)."""


@register(NAME, stage="cut", level=0, exact=True)
def budget(gm: fx.GraphModule, context: Context) -> PassReport:
    """A budget in bytes: saves what fits, and makes the rest again in the backward."""
    report, asked = PassReport(NAME), context.options.memory_budget
    if asked is None or isinstance(asked, float):
        return report
    tape = record(gm.graph, context.nodes)
    if isinstance(tape, str):
        raise OptionError(f'option "memory_budget" is {asked!r}, but the memory of this graph cannot be planned: {tape}; valid here: a fraction')
    step = Step(gm.graph, context.nodes, context.options.codegen == "inductor", context.options.target)
    inputs = sum(in_memory(n.meta["val"]) for n in gm.graph.nodes if compat_partition.is_input(n))
    plans = _hull(tape, step, context)
    if not plans:
        raise OptionError(f'option "memory_budget" is {asked!r}, but this graph\'s backward needs values that can be neither saved nor made again; valid here: a fraction')
    least = min(plans, key=lambda p: p[1].bytes)
    limit = least[1].bytes if asked == "min" else int((asked - inputs) * (1 - UNSEEN))
    fitting = [i for i, (_, peak) in enumerate(plans) if peak.bytes <= limit]
    if not fitting:
        smallest, node = int(least[1].bytes / (1 - UNSEEN)) + 1 + inputs, least[1].node
        raise OptionError(
            f'option "memory_budget" is {asked} bytes ({asked / 2**20:.1f} MiB); the smallest this graph can do is {smallest} bytes ({smallest / 2**20:.1f} MiB): '
            f"{inputs / 2**20:.1f} MiB of parameters and inputs, and {least[1].bytes / 2**20:.1f} MiB at {node.name} ({node.target}) of {module_path(node) or 'the model'}"
        )
    chosen = fitting[0]
    saved, peak = _refine(step, plans[chosen], plans[chosen - 1][0] if chosen else plans[chosen][0], limit)
    report.saved = saved_names(gm.graph, context.nodes, saved)
    least = min(least, (saved, peak), key=lambda p: p[1].bytes)
    report.rewrites = [site("recomputed", n) for n in peak.again if step.size[n]]
    report.notes = [f"modelled peak {(peak.bytes + inputs) / 2**20:.1f} MiB, of which {inputs / 2**20:.1f} MiB parameters and inputs; saving everything takes {(plans[0][1].bytes + inputs) / 2**20:.1f} MiB; the least is {(least[1].bytes + inputs) / 2**20:.1f} MiB"]
    return report


def _hull(tape: Tape, step: Step, context: Context) -> list[tuple[set[fx.Node], Peak]]:
    """Plans from saving what costs anything to make again, to recomputing whatever may be, each with its peak."""
    if context.options.hardware is None:
        raise OptionError(f'option "memory_budget" is {context.options.memory_budget}: planning needs times, and option "hardware" is None: {detect(context.options.target)[1]}')
    device = hardware(context.options.hardware)
    fused = context.options.codegen == "inductor"
    again, keep, _ = prices(tape)
    rate = device.memory_rate
    # Fused pointwise work and what keeping costs by itself: as without a budget; the price of the budget comes on top.
    unplanned = {o: again(o) / rate if fused else _seconds(o, device) for o in tape.operations}
    seconds = {o: price if price < math.inf else _seconds(o, device) for o, price in unplanned.items()}
    base = {v: keep(v) / rate if fused and context.options.target == "cpu" else 1e-15 for v in tape.values}
    ratios = [seconds[o] / v.bytes for o in tape.operations for v in o.outputs if v.bytes and 0 < seconds[o] < math.inf]
    low, high = (min(ratios), max(ratios) * 64) if ratios else (1.0, 1.0)
    plans: list[tuple[set[fx.Node], Peak]] = []
    for i in range(PRICES):
        price = low * (high / low) ** (i / (PRICES - 1)) * (i > 0)
        times = seconds if i else unplanned  # the first plan is the one without a budget
        saved = {v.node for v in cheapest(tape, times.__getitem__, lambda v: 0.0 if v.returned else price * v.bytes + base[v])}
        if plans and saved == plans[-1][0]:
            continue
        peak = step.peak(saved)
        if peak is not None:
            plans.append((saved, peak))
    return plans


def _seconds(operation: Operation, device: Hardware) -> float:
    """Modelled time of running an operation again; infinite where it must not be."""
    node = operation.node
    if compat_partition.must_save(node) or not compat_partition.is_pure(node):
        return math.inf
    moved = sum(v.bytes for v in (*operation.inputs, *operation.outputs))
    dtype = getattr(operation.outputs[0].node.meta["val"], "dtype", "float32") if operation.outputs else "float32"
    flops = 0 if operation.fusible else compat_partition.flops(node)
    return moved / device.memory_rate + flops / device.matrix_rate(dtype)


def _refine(step: Step, plan: tuple[set[fx.Node], Peak], richer: set[fx.Node], limit: int) -> tuple[set[fx.Node], Peak]:
    """``plan`` with as many of the last values of ``richer`` saved as fit."""
    extra = sorted(richer - plan[0], key=step.order.__getitem__, reverse=True)
    low, high, best = 0, len(extra), plan
    while low < high:
        middle = (low + high + 1) // 2
        saved = plan[0] | set(extra[:middle])
        peak = step.peak(saved)
        if peak is not None and peak.bytes <= limit:
            low, best = middle, (saved, peak)
        else:
            high = middle - 1
    return best
