"""What a graph's page shows beyond its text, as plain values for the page's script: kernels with module, time and
bytes, the device's roofs, memory over the step, sites and near misses, and the code of every pass as differences."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

from mindspeed_fx.report import lanes, modelled
from mindspeed_fx.report.diffs import diff_text, is_changed
from mindspeed_fx.report.records import GraphRecord
from mindspeed_fx.report.step_memory import StepMemory, step_memory

LIVE = 40
"""Results alive at the peak that the page lists."""


class Names:
    """Texts that repeat, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))

    @property
    def texts(self) -> list[str]:
        return list(self.numbers)


def page_data(record: GraphRecord) -> dict[str, Any]:
    """The values of one graph, ready for JSON. Seconds are modelled; without known hardware there are none."""
    names = Names()
    estimates = modelled.estimates(record)
    memory = step_memory(estimates)
    values: dict[str, Any] = {
        "meaning": modelled.MEANING,
        "kernels": {stage: _kernels(estimate, names) for stage, estimate in estimates.items()},
        "roofs": _roofs(next(iter(estimates.values()))) if estimates else None,
        "memory": _memory(memory, names) if memory else None,
        "timeline": _timeline(record, estimates, names),
        "passes": [_pass(run, names) for run in record.runs],
        "codes": record.stages,
        "first": {run.stage: run.before for run in reversed(record.runs) if run.before is not None},
    }
    return {**values, "names": names.texts}


def packed(values: Any) -> str:
    """JSON of ``values``, compressed, as text for a script element."""
    return base64.b64encode(gzip.compress(json.dumps(values, separators=(",", ":")).encode(), 6, mtime=0)).decode()


def _kernels(estimate: Any, names: Names) -> list[list[Any]]:
    """Name, operator, module, microseconds, FLOP, bytes, what bounds it, where its time is from: a row for each
    kernel."""
    return [
        [
            n.name,
            names(n.operator),
            names(n.module),
            round(n.seconds * 1e6, 3),
            int(estimate.value(n.cost.flops)),
            int(estimate.value(n.cost.bytes)),
            names(n.bound),
            names(n.timed),
        ]
        for n in estimate.nodes
    ]


def _roofs(estimate: Any) -> dict[str, Any]:
    """Peaks of the device in FLOP/s and B/s: of matrix products in the types that the graph has, of vectors, of the
    memory."""
    hw = estimate.hardware
    dtypes = dict.fromkeys(n.cost.dtype for n in estimate.nodes if n.cost.matrix)
    matrix = {f"products, {d}": float(hw.matrix[hw.substitute("matrix", d)]) for d in dtypes}
    return {"device": hw.title, "peaks": matrix, "bandwidth": float(hw.memory_bandwidth)}


def _timeline(record: GraphRecord, estimates: dict[str, Any], names: Names) -> dict[str, Any]:
    """The modelled schedule of every final graph, kernel by kernel as in "kernels", and what was measured; in
    microseconds. Starts are left out where everything runs on one lane, one kernel after the other."""
    graphs = {}
    for stage in (s for s in lanes.STEP if s in record.lanes):
        schedule = record.lanes[stage]
        graphs[stage] = {
            "lanes": schedule.names,
            "lane": list(schedule.lane_of) if len(schedule.names) > 1 else None,
            "start": lanes.starts_of(schedule) if len(schedule.names) > 1 else None,
            "us": round(schedule.seconds * 1e6, 3),
            "exposed": [
                [k, round(s * 1e6, 3), names(schedule.reasons.get(k, ""))]
                for k, s in sorted(schedule.exposed.items(), key=lambda item: -item[1])
            ],
        }
    kernels = record.measured.timeline if record.measured is not None else []
    rows = [[names(name), names(side), round(t * 1e6, 2), round(s * 1e6, 2)] for name, side, t, s in kernels]
    return {"graphs": graphs, "measured": rows}


def _memory(memory: StepMemory, names: Names) -> dict[str, Any]:
    curve = memory.curve
    return {
        "bytes": curve.bytes,
        "labels": [[names(module), names(operator)] for module, operator in curve.labels],
        "forward": curve.forward,
        "live": [[x.name, names(x.operator), names(x.module), x.bytes] for x in memory.live[:LIVE]],
        "others": [len(memory.live[LIVE:]), sum(x.bytes for x in memory.live[LIVE:])],
    }


def _pass(run: Any, names: Names) -> dict[str, Any]:
    return {
        "name": run.report.name,
        "stage": run.stage,
        "sites": [[names(s.operator), names(s.module), names(s.source)] for s in run.report.rewrites],
        "skips": [[names(s.reason), names(s.module), names(s.source)] for s in run.report.skipped],
        "diff": diff_text(run) if is_changed(run) else "",
    }
