"""What a pass changed, as text."""

from __future__ import annotations

import difflib

from mindspeed_fx.report.records import GraphRecord, PassRun


def is_changed(run: PassRun) -> bool:
    """True when the pass rewrote something and its code was kept."""
    return run.before is not None and run.after is not None and run.before != run.after


def diff_text(run: PassRun) -> str:
    """Unified diff of the code before and after a pass; computed once for each run."""
    if run.diff is None:
        before, after = run.before.splitlines(True), run.after.splitlines(True)
        run.diff = "".join(difflib.unified_diff(before, after, "before", "after", n=3))
    return run.diff


def lowered_counts(record: GraphRecord) -> dict[tuple[str, str, str, str], int]:
    """(operator, side, kernel, reason) -> number of calls."""
    counts: dict[tuple[str, str, str, str], int] = {}
    for row in record.lowered:
        key = (row["operator"], row["side"], row["kernel"], row["reason"])
        counts[key] = counts.get(key, 0) + 1
    return counts
