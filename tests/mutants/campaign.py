"""Mutants run one after the other, each result stored when it comes: a campaign that was cut off goes on."""

from __future__ import annotations

import json
import pathlib
import time
from dataclasses import asdict, dataclass
from typing import Iterator, Sequence

from tests.mutants.faults import Fault
from tests.mutants.process import Outcome, run_tests
from tests.mutants.recording import USUAL, Recording
from tests.mutants.tree import Tree

FIRST = 12
"""Tests of the first round: most mutants fall to one of them, and few files are imported for it."""


@dataclass
class Result:
    """``status``: "killed", "survived", "not finished" (a limit struck), or "not executed" by a recorded test."""

    name: str
    kind: str
    file: str
    line: int
    status: str
    test: str = ""
    message: str = ""
    ran: int = 0
    seconds: float = 0.0


STATUS = {"passed": "survived", "failed": "killed", "crashed": "killed", "limit": "not finished"}


def rounds(recording: Recording, tests: Sequence[str], most: float) -> Iterator[list[str]]:
    """First a few tests of two files, then the others, as long as all take no more than ``most`` seconds."""
    total, affordable = 0.0, []
    for test in tests:
        total += recording.seconds[test]
        if total <= most or not affordable:
            affordable.append(test)
    files = list(dict.fromkeys(t.partition("::")[0] for t in affordable))[:2]
    first = [t for t in affordable if t.partition("::")[0] in files][:FIRST]
    yield first
    if rest := [t for t in affordable if t not in set(first)]:
        yield rest


def run_fault(
    tree: Tree, recording: Recording, fault: Fault, limit: float, most: float, named: Sequence[str] = ()
) -> Result:
    """One mutant: its tests until one fails.

    Args:
        named: files or functions of tests to run instead of those that were recorded.
    """
    tests = list(named) or recording.tests(fault)
    result = Result(fault.name, fault.kind, fault.file, fault.line, "not executed")
    if not tests:
        return result
    ran, start = 0, time.monotonic()
    outcome = Outcome("passed")
    with tree.planted(fault):
        for part in [tests] if named else rounds(recording, tests, most):
            files = part if named else list(dict.fromkeys(t.partition("::")[0] for t in part))
            remaining = max(1.0, limit - (time.monotonic() - start))
            outcome = run_tests(tree.copy, files, None if named else part, tree.folder, remaining, (*USUAL, "-x"))
            ran += outcome.ran
            if outcome.status != "passed":
                break
    seconds = round(time.monotonic() - start, 1)
    status = STATUS[outcome.status]
    return Result(fault.name, fault.kind, fault.file, fault.line, status, outcome.test, outcome.message, ran, seconds)


def stored(file: pathlib.Path) -> dict[str, Result]:
    """The last result of each mutant, by its name."""
    if not file.exists():
        return {}
    results = (Result(**json.loads(line)) for line in file.read_text().splitlines())
    return {r.name: r for r in results}


def store(file: pathlib.Path, result: Result) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as f:
        f.write(json.dumps(asdict(result)) + "\n")
