"""Everything about a graph but its code, as plain values: metadata.json of a dump, written and read."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any, Iterable

from mindspeed_fx.report.facts import facts_of
from mindspeed_fx.report.modelled import modelled_rows
from mindspeed_fx.report.records import GraphRecord


def metadata(record: GraphRecord) -> dict[str, Any]:
    """Everything but the code, ready for JSON."""
    hidden: dict[str, Any] = {name: {} for name in ("calls", "stages", "estimates", "lanes", "kernels")}
    values = dataclasses.asdict(dataclasses.replace(record, **hidden))
    for name in (*hidden, "logged", "logged_graphs", "traced", "input_bytes"):
        del values[name]
    if values["measured"] is not None:
        del values["measured"]["timeline"]
    for run in values["runs"]:
        for code in ("before", "after", "diff"):
            run.pop(code)
        run["report"].pop("files")
        run["report"].pop("curves")
    return {**values, "counts": record.counts, "modelled": modelled_rows(record), **facts_of(record)}


def read_metadata(folder: pathlib.Path) -> dict[str, Any] | None:
    """What a graph's folder has; None where it is another version's, or is being written now."""
    try:
        values = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and "step" in values and "memory" in values else None


def read_all(root: pathlib.Path, folders: Iterable[pathlib.Path]) -> list[tuple[str, dict[str, Any]]]:
    """Folder below ``root`` and its metadata; another rank's that is being written now is left out, and its rank
    writes the index again."""
    known = ((folder, read_metadata(folder)) for folder in folders)
    return [(str(folder.relative_to(root)), values) for folder, values in known if values is not None]


def order_of_graph(folder: pathlib.Path) -> list[int]:
    """Sorts ``rankN/graphN`` by numbers."""
    return [int("".join(filter(str.isdigit, part)) or 0) for part in folder.parts[-2:]]
