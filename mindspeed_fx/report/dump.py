"""A dump directory: what ran on each graph, in order, with code before and after every pass that changed it.

DIR/index.md, index.html             all ranks and graphs
DIR/rank0/graph0/index.md            what ran, counts, times, effective options, sites, near misses
DIR/rank0/graph0/NN.stage.pass.{before.py,after.py,diff}
DIR/rank0/graph0/NN.stage.pass.NAME          what a pass adds: timelines
DIR/rank0/graph0/metadata.json, report.html
"""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
from typing import Any, Mapping

from mindspeed_fx.compat import distributed
from mindspeed_fx.private_files import write_whole
from mindspeed_fx.report import measured, memory
from mindspeed_fx.report.diffs import diff_text, is_changed, lowered_counts
from mindspeed_fx.report.metadata import metadata, order_of_graph, read_all
from mindspeed_fx.report.records import GraphRecord, PassRun

SHOWN = 0o644
"""Mode of the files: a dump is written to be read, by others than who ran the model."""

_begun: set[tuple[int, str, int]] = set()
"""(process, directory, rank) of the dumps that this process has begun."""


def write(record: GraphRecord, directory: str) -> pathlib.Path:
    """Write, or rewrite, the files of one graph; returns its folder.

    What an earlier process's dump left there for this rank goes first, see :func:`clear`.

    Raises:
        OSError: the directory cannot be written; the message names the option.
    """
    root = pathlib.Path(directory)
    folder = root / f"rank{record.rank}" / f"graph{record.index}"
    values = metadata(record)
    files, pictures = _files(record, values), _pictures(record)
    try:
        if (begun := (os.getpid(), str(root.resolve()), record.rank)) not in _begun:
            clear(directory, record.rank)
            _begun.add(begun)
        folder.mkdir(parents=True, exist_ok=True)
        if not folder.resolve().is_relative_to(root.resolve()):
            raise OSError(f"{folder} is a link to a place outside of it")
        _remove(folder, [n for n in _own(folder) if n not in {*files, *pictures, "metadata.json"}])
        # Before the files that it lists, so that those of a process that is killed here are known as ours.
        write_whole(
            folder / "metadata.json",
            json.dumps({**values, "files": sorted([*files, *pictures])}, indent=1, default=str),
            SHOWN,
        )
        for name, text in files.items():
            write_whole(folder / name, text, SHOWN)
        for name, curves in pictures.items():
            memory.png(curves, str(folder / name))
        write_index(root)
    except OSError as e:
        why = "; a directory that can be written, or made, is expected"
        raise OSError(f'option "dump": cannot write to {directory!r}: {e}{why}') from e
    return folder


def write_index(root: pathlib.Path) -> list[pathlib.Path]:
    """Write index.md and index.html of all graphs of all ranks that are in a dump; returns the graphs' folders. Every
    rank does so whenever it has written a graph; so does ``mindspeed-fx index``, where ranks wrote to different places.
    """
    from mindspeed_fx.report.html import index_page

    folders = sorted((g.parent for g in root.glob("rank*/graph*/index.md")), key=order_of_graph)
    lines = [f"- [{f.relative_to(root)}]({f.relative_to(root)}/index.md)\n" for f in folders]
    write_whole(root / "index.md", "# mindspeed_fx dump\n\n" + "".join(lines), SHOWN)
    write_whole(root / "index.html", index_page(read_all(root, folders)), SHOWN)
    return folders


def clear(directory: str, rank: int) -> None:
    """Remove what an earlier dump wrote for ``rank``, and for ranks that this run does not have, by the lists in
    metadata.json; whatever else lies there stays."""
    for folder in pathlib.Path(directory).glob("rank*/graph*"):
        number = folder.parent.name.removeprefix("rank")
        if number == str(rank) or (rank == 0 and number.isdigit() and int(number) >= distributed.world_size()):
            _remove(folder, _own(folder))
            for emptied in (folder, folder.parent):
                if not any(emptied.iterdir()):
                    emptied.rmdir()


def _remove(folder: pathlib.Path, names: list[str]) -> None:
    for name in names:
        if (folder / name).is_file():
            (folder / name).unlink(missing_ok=True)


def _own(folder: pathlib.Path) -> list[str]:
    """The files that a dump wrote into ``folder``; metadata.json, which says so, comes last."""
    try:
        names = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["files"]
        return [n for n in names if n == os.path.basename(n) != "metadata.json"] + ["metadata.json"]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _files(record: GraphRecord, values: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text of one graph, but for metadata.json."""
    from mindspeed_fx.report.html import graph_page

    files = {f"{number:02d}.graph.{stage}.py": text for number, (stage, text) in enumerate(record.stages.items())}
    for number, run in enumerate(record.runs):
        stem = _stem(number, run)
        if is_changed(run):
            files |= {f"{stem}.before.py": run.before, f"{stem}.after.py": run.after, f"{stem}.diff": diff_text(run)}
        files |= {f"{stem}.{_in_file_name(name)}": text for name, text in run.report.files.items()}
    return {**files, "index.md": index_text(record), "report.html": graph_page(record, values)}


def _stem(number: int, run: PassRun) -> str:
    return f"{number:02d}.{run.stage}.{_in_file_name(run.report.name)}"


def _in_file_name(text: str) -> str:
    """A name of a pass or of what it adds, as a part of a file's name: it names no folder."""
    return re.sub(r"[^\w.+-]", "_", text)


def _pictures(record: GraphRecord) -> dict[str, Any]:
    """File name -> curves of one graph; none without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    return {
        f"{_stem(number, run)}.memory.png": run.report.curves
        for number, run in enumerate(record.runs)
        if run.report.curves
    }


def index_text(record: GraphRecord) -> str:
    """The page a person reads first."""
    from mindspeed_fx.report.modelled import text

    lines = [f"# Graph {record.index}, rank {record.rank}", ""]
    lines += [
        f"{sum(record.counts.values())} rewrites. Times: "
        + ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in record.seconds.items())
        + ".",
        "",
    ]
    lines += [
        "| # | stage | pass | rewrites | near misses | nodes | ms | check | files |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for number, run in enumerate(record.runs):
        stem = _stem(number, run)
        files = (
            f"[before]({stem}.before.py) [after]({stem}.after.py) [diff]({stem}.diff)"
            if is_changed(run)
            else "unchanged"
        )
        files += "".join(f" [{_cell(name)}]({stem}.{_in_file_name(name)})" for name in run.report.files)
        lines.append(
            f"| {number:02d} | {run.stage} | {run.report.name} | {len(run.report.rewrites)} | "
            f"{len(run.report.skipped)} | {run.nodes_before} -> {run.nodes_after} | {run.seconds * 1e3:.1f} | "
            f"{run.check} | {files} |"
        )
    for run in record.runs:
        if run.report.notes:
            lines += ["", f"## {run.report.name} ({run.stage}): notes", "", *(f"- {n}" for n in run.report.notes)]
        if run.report.rewrites:
            lines += [
                "",
                f"## {run.report.name} ({run.stage}): rewrites",
                "",
                f"| operator | module | source |{' proof |' if run.proofs else ''}",
                f"|---|---|---|{'---|' if run.proofs else ''}",
            ]
            proofs = [f" {' : '.join(filter(None, (p.status, _cell(p.reason))))} |" for p in run.proofs]
            lines += [
                f"| {s.operator} | {_cell(s.module)} | {_cell(s.source)} |{proof}"
                for s, proof in zip(run.report.rewrites, proofs or [""] * len(run.report.rewrites))
            ]
        if run.report.skipped:
            lines += [
                "",
                f"## {run.report.name} ({run.stage}): near misses",
                "",
                "| reason | module | source |",
                "|---|---|---|",
            ]
            lines += [f"| {_cell(s.reason)} | {_cell(s.module)} | {_cell(s.source)} |" for s in run.report.skipped]
    if record.lowered:
        lines += [
            "",
            "## Kernels",
            "",
            "| operator | graph | kernel | calls | why not a better one |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {o} | {side} | {kernel} | {n} | {_cell(why)} |"
            for (o, side, kernel, why), n in lowered_counts(record).items()
        ]
    if record.measured is not None:
        lines += ["", "## Measured step", "", *measured.markdown(record.measured)]
    if cost := text(record):
        lines += ["", "## Modelled cost", "", *cost]
    lines += ["", "## Effective options", "", "| option | value |", "|---|---|"]
    lines += [f"| {k} | {_cell(str(v))} |" for k, v in record.effective.items()]
    if record.stages:
        lines += ["", "## Graphs", ""] + [f"- [{s}]({n:02d}.graph.{s}.py)" for n, s in enumerate(record.stages)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
