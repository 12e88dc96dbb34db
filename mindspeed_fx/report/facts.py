"""What answers need of a graph beside what its passes say, as plain values for JSON: memory and what is alive at its
peak, collectives, changes of type. A dump's metadata.json has them, so that it answers what the process itself would.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from mindspeed_fx.report.diffs import diff_text, is_changed
from mindspeed_fx.report.lanes import STEP, collectives, step_seconds
from mindspeed_fx.report.modelled import estimates
from mindspeed_fx.report.records import GraphRecord, PassRun
from mindspeed_fx.report.step_memory import step_memory

LIVE = 40
"""Results alive at the peak that are listed."""
BITS = {"f64": 64, "f32": 32, "bf16": 16, "f16": 16}
CAST = re.compile(r'^ {4}(\w+): "([\w.]+)\[.*= (?:aten|prims)\.(?:_to_copy|to|convert_element_type)[\w.]*\((\w+)')
TYPED = re.compile(r'^ {4}(?:# )?(\w+): "?([\w.]+)\[')


def facts_of(record: GraphRecord) -> dict[str, Any]:
    """The values of one graph: ``memory``, ``step`` and ``casts``."""
    known = estimates(record)
    return {
        "memory": _memory(record, known),
        "step": _step(record, known),
        "casts": [row for run in record.runs if (row := _narrowing(run))],
    }


def step_totals(graphs: Sequence[GraphRecord]) -> dict[str, Any]:
    """Seconds, kernels, bytes, peak and resident bytes of a step, modelled, over all graphs; the peaks of several add
    up, which is more than the step needs."""
    totals = {"seconds": 0.0, "kernels": 0, "bytes": 0, "peak": 0, "resident": 0}
    for record in graphs:
        known = {stage: e for stage, e in estimates(record).items() if stage in STEP}
        totals["seconds"] += step_seconds(record.lanes)
        totals["kernels"] += sum(int(e.value(e.kernels)) for e in known.values())
        totals["bytes"] += sum(int(e.value(e.bytes)) for e in known.values())
        memory = step_memory(known)
        totals["peak"] += memory.curve.peak if memory else 0
        totals["resident"] += resident_bytes(record.input_bytes)
    return totals


def resident_bytes(sizes: Mapping[str, int]) -> int:
    """Parameters, buffers and inputs."""
    return sizes.get("trainable", 0) + sizes.get("other", 0)


def _memory(record: GraphRecord, known: Mapping[str, Any]) -> dict[str, Any] | None:
    memory = step_memory(known)
    if memory is None:
        return None
    curve = memory.curve
    at = curve.bytes.index(curve.peak) if curve.bytes else 0
    module, operator = curve.labels[at] if curve.labels else ("", "")
    return {
        "peak": curve.peak,
        "at": {"module": module, "operator": operator, "kernel": at, "kernels": len(curve.bytes)},
        "backward_begins": curve.forward,
        "live": [dataclasses.asdict(x) for x in memory.live[:LIVE]],
        "others": {"count": len(memory.live[LIVE:]), "bytes": sum(x.bytes for x in memory.live[LIVE:])},
        "given": record.input_bytes,
        "capacity": int(next(iter(known.values())).hardware.memory),
    }


def _step(record: GraphRecord, known: Mapping[str, Any]) -> dict[str, Any] | None:
    """The modelled schedule in numbers."""
    if not record.lanes:
        return None
    rows = collectives(record.lanes, known)
    return {
        "seconds": step_seconds(record.lanes),
        "graphs": {graph: lanes.seconds for graph, lanes in record.lanes.items()},
        "compute_seconds": sum(n.seconds for g in record.lanes for n in known[g].nodes if not n.tier),
        "exposed_seconds": sum(s.exposed for s in rows),
        "collectives": [dataclasses.asdict(s) for s in rows],
    }


def _narrowing(run: PassRun) -> dict[str, Any] | None:
    """Changes to a shorter floating type that a pass brought in, or took away."""
    if not is_changed(run):
        return None
    difference = diff_text(run).splitlines()
    marked = [line for line in difference if line[:1] in "+-" and CAST.match(line[1:])]
    if not marked:
        return None
    types = {**_types((run.before or "").splitlines()), **_types((run.after or "").splitlines())}
    counts = Counter(line[0] for line in marked if _is_narrowing(line[1:], types))
    more = counts["+"] - counts["-"]
    return {"pass": run.report.name, "stage": run.stage, "more": more} if more else None


def _types(lines: Iterable[str]) -> dict[str, str]:
    return {match[1]: match[2] for line in lines if (match := TYPED.match(line))}


def _is_narrowing(line: str, types: Mapping[str, str]) -> bool:
    match = CAST.match(line)
    if match is None:
        return False
    before, after = BITS.get(types.get(match[3], "")), BITS.get(match[2], 8 if "float8" in match[2] else None)
    return before is not None and after is not None and after < before
