"""Timelines of simulated steps: Chrome trace JSON (chrome://tracing, Perfetto) and an inline SVG picture, before and
after.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Mapping

from mindspeed_fx.report import svg

_COLORS = {
    "compute": "#0969da",
    "all_gather": "#1a7f37",
    "reduce_scatter": "#bf8700",
    "all_reduce": "#cf222e",
    "all_to_all": "#8250df",
    "other": "#6e7781",
}
_WIDTH, _LANE, _LEFT, _MEMORY = 960, 16, 110, 48


def chrome_trace(timelines: Mapping[str, Any]) -> str:
    """JSON of the Trace Event Format; one process per timeline, one thread per resource, a counter of memory.

    Args:
        timelines: name -> :class:`mindspeed_fx.passes.overlap.model.simulator.Timeline`.
    """
    events: list[str] = []  # a step has tens of thousands: json.dumps takes several times as long as writing them
    for pid, (name, timeline) in enumerate(timelines.items()):
        tracks, tasks, start, memory, last = (
            _lanes(timeline),
            timeline.graph.tasks,
            timeline.start,
            timeline.memory,
            None,
        )
        events.append(json.dumps({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}))
        events += [
            json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}})
            for lane, tid in tracks.items()
        ]
        for k, i in enumerate(timeline.order):
            task = tasks[i]
            if task.seconds:
                args = f'"exposed_us": {timeline.exposed[i] * 1e6!r}' if i in timeline.exposed else ""
                events.append(
                    f'{{"ph": "X", "pid": {pid}, "tid": {tracks[task.resource]}, "ts": {start[i] * 1e6!r}, "dur": '
                    f'{task.seconds * 1e6!r}, "name": {_quoted(task.name)}, "cat": {_quoted(task.kind)}, "args": '
                    f"{{{args}}}}}"
                )
            if memory and memory[k] != last:
                last = memory[k]
                events.append(
                    f'{{"ph": "C", "pid": {pid}, "ts": {start[i] * 1e6!r}, "name": "memory", "args": {{"bytes": '
                    f"{last}}}}}"
                )
    return f'{{"traceEvents": [{", ".join(events)}], "displayTimeUnit": "ms"}}'


def picture(timelines: Mapping[str, Any]) -> str:
    """An SVG with one band per timeline on a common time axis: a lane per resource and the memory curve below."""
    longest = max((t.seconds for t in timelines.values()), default=0.0) or 1.0
    peak = max((t.peak for t in timelines.values()), default=0)
    parts, y = [], 4
    for name, timeline in timelines.items():
        lost = timeline.exposed_seconds
        parts.append(
            svg.text(
                0,
                y + 11,
                f"{name}: {timeline.seconds * 1e3:.3f} ms, {lost * 1e3:.3f} ms of communication exposed, peak "
                f"{timeline.peak / 2**20:.1f} MiB",
            )
        )
        y += _LANE
        tracks = _lanes(timeline)
        for lane, n in tracks.items():
            parts.append(svg.text(0, y + n * (_LANE + 2) + 11, lane[:16]))
        scale = (_WIDTH - _LEFT) / longest
        for resource, begin, end, kind, title in _blocks(timeline, longest / (_WIDTH - _LEFT)):
            width = max((end - begin) * scale, 0.4)
            at = y + tracks[resource] * (_LANE + 2)
            parts.append(svg.rect(_LEFT + begin * scale, at, width, _LANE, _color(kind), title))
        y += len(tracks) * (_LANE + 2) + 4
        if peak and timeline.memory:
            curve = svg.element("path", d=_curve(timeline, y, scale, peak), fill="#8888", stroke="none")
            parts += [svg.text(0, y + 11, "memory"), curve]
            y += _MEMORY + 6
        y += 10
    for n, (kind, color) in enumerate(_COLORS.items()):
        parts += [svg.rect(_LEFT + 130 * n, y, 10, 10, color), svg.text(_LEFT + 130 * n + 14, y + 10, kind)]
    return svg.picture(_WIDTH, y + 16, parts, "Modelled timeline of the step")


def png(timelines: Mapping[str, Any], path: str) -> None:
    """The same picture as a PNG file; needs matplotlib.

    Raises:
        ImportError: matplotlib is not installed (extra "report").
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    longest = max((t.seconds for t in timelines.values()), default=0.0) or 1.0
    figure, axes = plt.subplots(
        len(timelines), 1, figsize=(12, 1.2 + 1.6 * len(timelines)), sharex=True, squeeze=False, layout="constrained"
    )
    for axis, (name, timeline) in zip(axes[:, 0], timelines.items()):
        tracks = _lanes(timeline)
        for resource, begin, end, kind, _ in _blocks(timeline, longest / 2000):
            axis.broken_barh(
                [(begin * 1e3, (end - begin) * 1e3)], (-tracks[resource] - 0.4, 0.8), facecolors=_color(kind)
            )
        axis.set_yticks([-n for n in tracks.values()], list(tracks))
        axis.set_title(
            f"{name}: {timeline.seconds * 1e3:.2f} ms, exposed {timeline.exposed_seconds * 1e3:.2f} ms",
            fontsize=10,
            loc="left",
        )
    axes[-1, 0].set_xlabel("ms")
    figure.savefig(path, dpi=120)
    plt.close(figure)


_quoted = functools.lru_cache(4096)(json.dumps)


def _lanes(timeline: Any) -> dict[str, int]:
    return {lane: n for n, lane in enumerate(["compute", *timeline.graph.links])}


def _blocks(timeline: Any, gap: float) -> list[tuple[str, float, float, str, str]]:
    """Runs of tasks of one kind on one resource with no visible gap, merged: a step has tens of thousands of tasks."""
    open_: dict[str, list] = {}
    done = []
    for i in timeline.order:
        task = timeline.graph.tasks[i]
        if not task.seconds:
            continue
        block = open_.get(task.resource)
        if (
            block
            and block[3] == task.kind
            and timeline.start[i] - block[2] < gap
            and timeline.end[i] - block[1] < 4 * gap
        ):
            block[2] = max(block[2], timeline.end[i])
            block[5] += 1
            continue
        if block:
            done.append(block)
        open_[task.resource] = [task.resource, timeline.start[i], timeline.end[i], task.kind, task.name, 1]
    done += open_.values()
    return [
        (r, b, e, k, f"{name}{f' and {n - 1} more' if n > 1 else ''}: {(e - b) * 1e3:.3f} ms")
        for r, b, e, k, name, n in done
    ]


def _curve(timeline: Any, y: float, scale: float, peak: int) -> str:
    points, last = [f"M{_LEFT},{y + _MEMORY}"], None
    for k, i in enumerate(timeline.order):
        at = (round(_LEFT + timeline.start[i] * scale), round(y + _MEMORY * (1 - timeline.memory[k] / peak), 1))
        if at != last:
            points.append(f"L{at[0]},{at[1]}")
            last = at
    return " ".join([*points, f"L{last[0] if last else _LEFT},{y + _MEMORY}Z"])


def _color(kind: str) -> str:
    return next((c for k, c in _COLORS.items() if kind.startswith(k)), _COLORS["other"])
