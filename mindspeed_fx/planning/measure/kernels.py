"""The kernels of a compiled step by torch.profiler, each mapped to the nodes of the graphs that it computes.

A graph calls its kernels in one order, so that the k-th call of a name in the forward (or backward) belongs to the k-th
entry of that name: a call of the graph where no code is generated, else a kernel of which Inductor says what nodes it
computes. Where the numbers of calls and entries differ nothing is guessed: these kernels are listed as not mapped.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch

from mindspeed_fx.report.measured import KernelTime, Measured
from mindspeed_fx.report.modelled import estimates
from mindspeed_fx.report.records import GraphRecord

STEPS = 3
"""Under the profiler, after one that warms it up."""
REGIONS = ("Torch-Compiled Region", "CompiledFunction")
"""Beginnings of the names of what runs compiled graphs; "CompiledFunctionBackward" runs those of the backward."""


@dataclass(frozen=True)
class Event:
    """A kernel that ran: an operator called by a graph, or a generated kernel."""

    name: str
    side: str
    """"forward", "backward" or "inference"."""
    start: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Kernels of :data:`STEPS` steps."""

    events: list[Event]
    steps: int
    seconds: float
    """Of one step, by the clock."""


@dataclass(frozen=True)
class Entry:
    """A kernel that a graph calls once in a step."""

    graph: int
    side: str
    number: int
    """Of the kernel in its graph."""
    nodes: tuple[str, ...]


def profile_step(run: Callable[[], Any], device: str, prepare: Callable[[], None]) -> Profile | None:
    """The kernels of a compiled step; None on a device whose profiler is not torch's own.

    Args:
        device: "cpu", "cuda" or "npu".
    """
    if device == "npu":
        return None
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] + [kinds.CUDA] * (device == "cuda")
    prepare()
    run()
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        for _ in range(STEPS):
            prepare()
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / STEPS
    roots = [e for e in profiler.events() if e.cpu_parent is None and not _is_on_device(e)]
    clock = "cpu_time_total" if device == "cpu" else "device_time_total"
    return Profile([event for root in roots for event in walk(root, clock)], STEPS, seconds)


def _is_on_device(event: Any) -> bool:
    """Kernels of an accelerator are also listed beside the calls that they are counted with."""
    return "CPU" not in str(event.device_type)


def walk(event: Any, clock: str, side: str = "") -> Iterator[Event]:
    """The topmost kernels below ``event`` that compiled graphs called.

    Args:
        event: ``name``, ``time_range.start``, ``cpu_children`` and the time, in microseconds, as torch.profiler's
            ``FunctionEvent`` has them.
        clock: attribute that is the time of a kernel with all that it calls.
        side: of the graph that is running; "" outside of compiled graphs.
    """
    name = event.name
    is_region = name.startswith(REGIONS)
    if name.startswith("CompiledFunctionBackward"):
        side = "backward"
    elif name.startswith("CompiledFunction"):
        side = "forward"
    elif is_region:
        side = side or "inference"
    if side and not is_region and ("::" in name or _is_generated(name)):
        yield Event(_plain(name), side, event.time_range.start, getattr(event, clock) * 1e-6)
        return
    for child in event.cpu_children:
        yield from walk(child, clock, side)


def _is_generated(name: str) -> bool:
    return re.match(r"(graph_\d+_)?(cpp|triton)_", name) is not None


def _plain(name: str) -> str:
    """One spelling of what profiler and Inductor call a kernel."""
    name = re.sub(r"^graph_\d+_", "", name)
    name = re.sub(r"^extern_kernels\.", "aten::", name)
    return re.sub(r"^(?:torch\.ops\.)?(aten|prims|mindspeed|\w+)\.(\w+)(\.\w+)?$", r"\1::\2", name)


def kernel_times(result: Measured, profile: Profile | None, graphs: list[GraphRecord]) -> None:
    """Fills in what ``result`` says of kernels."""
    if profile is None:
        result.notes.append(f"kernels were not looked at: torch.profiler does not see those of {result.device}")
        return
    result.profiled_seconds = profile.seconds
    result.timeline = last_step(profile)
    entries = expected_entries(graphs)
    pairs, result.unmapped = match_events(profile, entries)
    rows, result.unseen_modelled_seconds = _rows(pairs, profile.steps, graphs, result.hardware is not None)
    result.kernels = sorted(rows, key=lambda k: -k.seconds)
    if result.unseen_modelled_seconds:
        result.notes.append(
            f"{result.unseen_modelled_seconds * 1e6:,.1f} us are modelled for nodes of which no kernel was seen"
        )


def last_step(profile: Profile) -> list[tuple[str, str, float, float]]:
    """Kernel, side, start and seconds of each kernel of the last step; [] where the steps differ in their kernels."""
    events = sorted(profile.events, key=lambda e: e.start)
    count, rest = divmod(len(events), profile.steps)
    if rest or not count:
        return []
    events = events[-count:]
    return [(e.name, e.side, (e.start - events[0].start) * 1e-6, e.seconds) for e in events]


def expected_entries(graphs: list[GraphRecord]) -> dict[tuple[str, str], list[Entry]]:
    """(side, kernel) -> its calls in one step, in order: graphs run their forwards in order, and their backwards from
    the last to the first."""
    results: dict[tuple[str, str], list[Entry]] = {}
    for side in ("forward", "inference", "backward"):
        for graph in reversed(graphs) if side == "backward" else graphs:
            for number, (name, nodes) in enumerate(_kernels_of(graph, side)):
                results.setdefault((side, _plain(name)), []).append(Entry(graph.index, side, number, nodes))
    return results


def _kernels_of(graph: GraphRecord, side: str) -> list[tuple[str, tuple[str, ...]]]:
    if graph.effective.get("codegen") == "inductor":
        kernels = graph.kernels.get(side, {})
        in_order = sorted(kernels, key=lambda name: int(name.rpartition(":")[2]))  # "name:number", counted by call
        rows = [(name.rpartition(":")[0], tuple(kernels[name])) for name in in_order]
        for run in graph.runs:
            for layers in run.report.layers if run.stage == side else ():
                rows = _of_each_layer(rows, layers)
        return rows
    calls = graph.calls[side].calls if side in graph.calls else []
    return [(call.operator, (call.name,)) for call in calls]


def _of_each_layer(
    kernels: list[tuple[str, tuple[str, ...]]], layers: tuple[tuple[str, ...], ...]
) -> list[tuple[str, tuple[str, ...]]]:
    """``kernels``, with those of a graph that all ``layers`` call once for each layer. Its nodes are named as those of
    the first; besides, a kernel of it may name nodes that it only reads."""
    first = {name: i for i, name in enumerate(layers[0])}
    inside = [i for i, (_, nodes) in enumerate(kernels) if any(n in first for n in nodes)]
    if not inside:
        return kernels
    body = [(name, [first[n] for n in nodes if n in first]) for name, nodes in (kernels[i] for i in inside)]
    called = [(name, tuple(layer[i] for i in places)) for layer in layers for name, places in body]
    return kernels[: inside[0]] + called + kernels[inside[-1] + 1 :]


def match_events(
    profile: Profile, entries: dict[tuple[str, str], list[Entry]]
) -> tuple[list[tuple[str, Entry, float]], dict[str, float]]:
    """(kernel, entry, seconds in all steps) of every event that is one, and name -> seconds of one step of the others,
    the longest first."""
    by_name: dict[tuple[str, str], list[Event]] = {}
    for event in sorted(profile.events, key=lambda e: e.start):
        by_name.setdefault((event.side, event.name), []).append(event)
    pairs: list[tuple[str, Entry, float]] = []
    unmapped: Counter[str] = Counter()
    for (side, name), events in by_name.items():
        expected = entries.get((side, name), [])
        if len(expected) * profile.steps != len(events):
            unmapped[name] += sum(e.seconds for e in events) / profile.steps
            continue
        pairs += [(name, expected[i % len(expected)], event.seconds) for i, event in enumerate(events)]
    return pairs, dict(unmapped.most_common())


def _rows(
    pairs: list[tuple[str, Entry, float]], steps: int, graphs: list[GraphRecord], is_modelled: bool
) -> tuple[list[KernelTime], float]:
    """A row for each kernel, direction and module, and the modelled seconds of nodes without a kernel."""
    modelled, unseen = _modelled(list(dict.fromkeys(entry for _, entry, _ in pairs)), graphs)
    modules = {
        (graph.index, side, call.name): call.module
        for graph in graphs
        for side, calls in graph.calls.items()
        for call in calls.calls
    }
    seconds: Counter[tuple[str, str, str]] = Counter()
    groups: dict[tuple[str, str, str], set[Entry]] = {}
    for name, entry, time_of_event in pairs:
        votes = Counter(m for n in entry.nodes if (m := modules.get((entry.graph, entry.side, n))))
        module = votes.most_common(1)[0][0] if votes else ""
        key = (re.sub(r"_\d+$", "", name), entry.side, re.sub(r"(?<![^.])\d+(?![^.])", "*", module))
        seconds[key] += time_of_event / steps
        groups.setdefault(key, set()).add(entry)
    rows = [
        KernelTime(*key, len(group), seconds[key], sum(modelled[e] for e in group) if is_modelled else None)
        for key, group in groups.items()
    ]
    return rows, unseen


def _modelled(entries: list[Entry], graphs: list[GraphRecord]) -> tuple[Counter[Entry], float]:
    """Modelled seconds of every entry, and those of nodes that are of none.

    The model groups pointwise work by itself: a group counts for the kernel that computes most of its nodes.
    """
    kernels_of: dict[tuple[int, str, str], list[Entry]] = {}
    for entry in entries:
        for node in entry.nodes:
            kernels_of.setdefault((entry.graph, entry.side, node), []).append(entry)
    seconds: Counter[Entry] = Counter()
    unseen = 0.0
    for graph in graphs:
        for side, estimate in estimates(graph).items():
            for group in estimate.nodes if side != "captured" else ():
                names = group.members or (group.name,)
                votes = Counter(e for name in names for e in kernels_of.get((graph.index, side, name), ()))
                if votes:
                    seconds[votes.most_common(1)[0][0]] += group.seconds
                else:
                    unseen += group.seconds
    return seconds, unseen
