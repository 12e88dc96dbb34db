"""Where answers come from: the records of this process, or the files of a dump."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any, Mapping, Sequence

from mindspeed_fx.errors import OptionError
from mindspeed_fx.report.answers.base import Change, Facts
from mindspeed_fx.report.diffs import diff_text, is_changed
from mindspeed_fx.report.metadata import metadata, order_of_graph, read_metadata
from mindspeed_fx.report.records import GraphRecord

DIFF = re.compile(r"(\d+)\.([a-z]+)\.(.+)\.diff")
CODE = re.compile(r"\d+\.graph\.(\w+)\.py")


def of_records(
    graphs: Sequence[GraphRecord], memory: int | None = None, known: Sequence[Mapping[str, Any]] | None = None
) -> list[Facts]:
    """Of every graph that this process compiled.

    Args:
        known: metadata of the graphs, where it was made already.
    """
    values = known or [metadata(graph) for graph in graphs]
    return [
        Facts(v, functools.partial(_changes, graph), functools.partial(_codes, graph), lambda: list(values), memory)
        for v, graph in zip(values, graphs)
    ]


def of_dump(directory: str, memory: int | None = None) -> list[Facts]:
    """Of every graph of the lowest rank in a dump.

    Raises:
        OptionError: the directory is no dump.
    """
    root = pathlib.Path(directory)
    folders = sorted(root.glob("rank*/graph*"), key=order_of_graph)
    known = [(folder, values) for folder in folders if (values := read_metadata(folder)) is not None]
    if not known:
        raise OptionError(
            f'{directory} is no dump: there is no rank*/graph*/metadata.json in it; options={{"dump": DIR}} and '
            "mindspeed-fx explain --save DIR write one"
        )
    first = min(values["rank"] for _, values in known)
    ranks: list[Mapping[str, Any]] = [values for _, values in known]
    return [
        Facts(v, functools.partial(_saved_changes, f), functools.partial(_saved_codes, f), lambda: ranks, memory)
        for f, v in known
        if v["rank"] == first
    ]


def _changes(record: GraphRecord) -> list[Change]:
    return [
        Change(number, run.stage, run.report.name, diff_text(run))
        for number, run in enumerate(record.runs)
        if is_changed(run)
    ]


def _codes(record: GraphRecord) -> Mapping[str, str]:
    first: dict[str, str] = {}
    for run in record.runs:
        if run.before is not None:
            first.setdefault(f"{run.stage}, before the passes", run.before)
    return {**first, **record.stages}


def _saved_changes(folder: pathlib.Path) -> list[Change]:
    names = [(match, path) for path in sorted(folder.glob("*.diff")) if (match := DIFF.fullmatch(path.name))]
    return [Change(int(m[1]), m[2], m[3], path.read_text(encoding="utf-8")) for m, path in names]


def _saved_codes(folder: pathlib.Path) -> Mapping[str, str]:
    before: dict[str, str] = {}
    for path in sorted(folder.glob("*.before.py")):
        stage = path.name.split(".")[1]
        if f"{stage}, before the passes" not in before:
            before[f"{stage}, before the passes"] = path.read_text(encoding="utf-8")
    finals = {m[1]: p for p in sorted(folder.glob("*.py")) if (m := CODE.fullmatch(p.name))}
    return {**before, **{stage: path.read_text(encoding="utf-8") for stage, path in finals.items()}}
