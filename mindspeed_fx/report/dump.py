"""A dump directory: what ran on each graph, in order, with code before and after every pass that changed it.

    DIR/index.md, index.html             all ranks and graphs
    DIR/rank0/graph0/index.md            what ran, counts, times, effective options, sites, near misses
    DIR/rank0/graph0/NN.stage.pass.{before.py,after.py,diff}
    DIR/rank0/graph0/NN.stage.pass.NAME          what a pass adds: timelines
    DIR/rank0/graph0/metadata.json, report.html
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import os
import pathlib
import tempfile
from typing import Any

from mindspeed_fx.report import memory
from mindspeed_fx.report.records import GraphRecord, PassRun


def write(record: GraphRecord, directory: str) -> pathlib.Path:
    """Write, or rewrite, the files of one graph; returns its folder.

    Raises:
        OSError: the directory cannot be written; the message names the option.
    """
    from mindspeed_fx.report.html import graph_page, index_page

    root = pathlib.Path(directory)
    folder = root / f"rank{record.rank}" / f"graph{record.index}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, stage in enumerate(record.stages):
            _write(folder / f"{number:02d}.graph.{stage}.py", record.stages[stage])
        for number, run in enumerate(record.runs):
            if changed(run):
                stem = f"{number:02d}.{run.stage}.{run.report.name}"
                _write(folder / f"{stem}.before.py", run.before)
                _write(folder / f"{stem}.after.py", run.after)
                _write(folder / f"{stem}.diff", diff_text(run))
            for name, text in run.report.files.items():
                _write(folder / f"{number:02d}.{run.stage}.{run.report.name}.{name}", text)
            if run.report.curves and importlib.util.find_spec("matplotlib"):
                memory.png(run.report.curves, str(folder / f"{number:02d}.{run.stage}.{run.report.name}.memory.png"))
        _write(folder / "index.md", index_text(record))
        _write(folder / "metadata.json", json.dumps(metadata(record), indent=1, default=str))
        _write(folder / "report.html", graph_page(record))
        graphs = sorted(root.glob("rank*/graph*/index.md"))
        _write(root / "index.md", "# mindspeed_fx dump\n\n" + "".join(f"- [{g.parent.relative_to(root)}]({g.relative_to(root)})\n" for g in graphs))
        _write(root / "index.html", index_page([str(g.parent.relative_to(root)) for g in graphs]))
    except OSError as e:
        raise OSError(f'option "dump": cannot write to {directory!r}: {e}') from e
    return folder


def changed(run: PassRun) -> bool:
    """True when the pass rewrote something and its code was kept."""
    return run.before is not None and run.after is not None and run.before != run.after


def diff_text(run: PassRun) -> str:
    """Unified diff of the code before and after a pass."""
    return "".join(difflib.unified_diff(run.before.splitlines(True), run.after.splitlines(True), "before", "after", n=3))


def metadata(record: GraphRecord) -> dict[str, Any]:
    """Everything but the code, ready for JSON."""
    from mindspeed_fx.report.modelled import rows

    values = dataclasses.asdict(dataclasses.replace(record, calls={}, stages={}))
    del values["stages"], values["calls"]
    for run in values["runs"]:
        run.pop("before")
        run.pop("after")
        run["report"].pop("files")
        run["report"].pop("curves")
    return {**values, "counts": record.counts, "modelled": rows(record)}


def index_text(record: GraphRecord) -> str:
    """The page a person reads first."""
    from mindspeed_fx.report.modelled import text

    lines = [f"# Graph {record.index}, rank {record.rank}", ""]
    lines += [f"{sum(record.counts.values())} rewrites. Times: " + ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in record.seconds.items()) + ".", ""]
    lines += ["| # | stage | pass | rewrites | near misses | nodes | ms | check | files |", "|---|---|---|---|---|---|---|---|---|"]
    for number, run in enumerate(record.runs):
        stem = f"{number:02d}.{run.stage}.{run.report.name}"
        files = f"[before]({stem}.before.py) [after]({stem}.after.py) [diff]({stem}.diff)" if changed(run) else "unchanged"
        files += "".join(f" [{name}]({stem}.{name})" for name in run.report.files)
        lines.append(f"| {number:02d} | {run.stage} | {run.report.name} | {len(run.report.rewrites)} | {len(run.report.skipped)} | {run.nodes_before} -> {run.nodes_after} | {run.seconds * 1e3:.1f} | {run.check} | {files} |")
    for run in record.runs:
        if run.report.notes:
            lines += ["", f"## {run.report.name} ({run.stage}): notes", "", *(f"- {n}" for n in run.report.notes)]
        if run.report.rewrites:
            lines += ["", f"## {run.report.name} ({run.stage}): rewrites", "", "| operator | module | source |", "|---|---|---|"]
            lines += [f"| {s.operator} | {_cell(s.module)} | {_cell(s.source)} |" for s in run.report.rewrites]
        if run.report.skipped:
            lines += ["", f"## {run.report.name} ({run.stage}): near misses", "", "| reason | module | source |", "|---|---|---|"]
            lines += [f"| {_cell(s.reason)} | {_cell(s.module)} | {_cell(s.source)} |" for s in run.report.skipped]
    if record.lowered:
        lines += ["", "## Kernels", "", "| operator | graph | kernel | calls | why not a better one |", "|---|---|---|---|---|"]
        lines += [f"| {o} | {side} | {kernel} | {n} | {_cell(why)} |" for (o, side, kernel, why), n in lowered_counts(record).items()]
    if cost := text(record):
        lines += ["", "## Modelled cost", "", *cost]
    lines += ["", "## Effective options", "", "| option | value |", "|---|---|"]
    lines += [f"| {k} | {_cell(str(v))} |" for k, v in record.effective.items()]
    if record.stages:
        lines += ["", "## Graphs", ""] + [f"- [{s}]({n:02d}.graph.{s}.py)" for n, s in enumerate(record.stages)]
    return "\n".join(lines) + "\n"


def lowered_counts(record: GraphRecord) -> dict[tuple[str, str, str, str], int]:
    """(operator, side, kernel, reason) -> number of calls."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for row in record.lowered:
        key = (row["operator"], row["side"], row["kernel"], row["reason"])
        counts[key] = counts.get(key, 0) + 1
    return counts


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _write(path: pathlib.Path, text: str) -> None:
    """Whole or not at all: a reader, or another rank, never sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(name, 0o644)
    os.replace(name, path)
