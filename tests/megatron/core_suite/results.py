"""What a run of Megatron-core's tests gave: the outcome of every test over its ranks, and the cause of what failed."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ORDER = ("passed", "xfailed", "xpassed", "skipped", "failed")
"""From the mildest to the worst: of several phases and ranks the worst counts."""


@dataclass
class Result:
    """How one test ended.

    Args:
        file: below tests/unit_tests.
        name: of the test in it; empty where the file could not be imported.
        outcome: one of :data:`ORDER`, or "late" where it had not ended when its time was over.
        text: of the skip or of the error.
        places: "file:line" of the traceback, outermost first.
    """

    file: str
    name: str
    outcome: str
    text: str = ""
    places: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cause:
    """Why a test fails: ``pattern`` is in the error and ``where`` in the places it went through."""

    name: str
    pattern: str
    where: str = ""
    outcome: str = ""


UNEXPLAINED = "unexplained"


def read(folder: Path) -> list[Result]:
    """Every test of the records in ``folder``, one result for each test."""
    results: list[Result] = []
    for inner in sorted(p for p in folder.iterdir() if p.is_dir()):
        file = inner.name.replace("~", "/").removeprefix("tests/unit_tests/")
        end = inner / "end.json"
        late = json.loads(end.read_text())["late"] if end.exists() else True
        ranks = [_read_rank(path, file, late) for path in sorted(inner.glob("*.jsonl"))]
        results += _worst(ranks) or [Result(file, "", "late" if late else "failed", "ended before a test began")]
    return results


def _read_rank(path: Path, file: str, late: bool) -> dict[str, Result]:
    """Test -> result of one rank; a test that began and did not end stopped the process."""
    results: dict[str, Result] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "collected" in record:
            continue
        name = record["test"].partition("::")[2]
        if record["when"] == "begin":
            results[name] = Result(file, name, "late" if late else "failed", "ended the process")
            continue
        new = Result(file, name, record["outcome"], record.get("text", ""), tuple(record.get("places", ())))
        old = results.get(name)
        if old is None or old.text == "ended the process" or _rank_of(new) > _rank_of(old):
            results[name] = new
    return results


def _worst(ranks: list[dict[str, Result]]) -> list[Result]:
    names = dict.fromkeys(name for results in ranks for name in results)
    return [max((r[name] for r in ranks if name in r), key=_rank_of) for name in names]


def _rank_of(result: Result) -> int:
    return ORDER.index(result.outcome) if result.outcome in ORDER else len(ORDER)


def cause_of(result: Result, causes: tuple[Cause, ...]) -> str:
    """The first cause that fits a result that failed."""
    for cause in causes:
        is_outcome = cause.outcome in ("", result.outcome)
        if is_outcome and re.search(cause.pattern, result.text) and re.search(cause.where, " ".join(result.places)):
            return cause.name
    return UNEXPLAINED


def count(results: list[Result]) -> dict[str, Counter[str]]:
    """File -> outcome -> number of tests."""
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(result.file, Counter())[result.outcome] += 1
    return counts
