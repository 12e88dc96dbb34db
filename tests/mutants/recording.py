"""Which test executes which line of the package, and how long it takes: recorded once, some files at a time."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import time
from typing import Any, Iterator, Mapping, Sequence

import pytest

from tests.mutants.faults import Fault
from tests.mutants.process import Outcome, run_tests
from tests.mutants.tree import Tree

USUAL = ("-m", "not slow and not cuda")

LEFT_OUT = (
    "tests/test_layout.py",
    "tests/test_floors.py",
    "tests/test_words.py",
    "tests/test_imports.py",
    "tests/docs/",
)
"""Tests of how the package is written: they fail where a line is too long, and show nothing wrong."""


class Recorder:
    """pytest's plugin: the lines that each test executes, by ``coverage``, and seconds of what passed.

    ``seconds`` are those of a run before, by test: what took longer than ``longest`` is left out, and of each function
    all but its ``cases`` cheapest cases.
    """

    def __init__(self, tree: Tree, files: Sequence[str], seconds: Mapping[str, float], longest: float, cases: int):
        import coverage

        self.files = list(files)
        self.target = tree.folder / "recording" / files[0].removesuffix(".py").replace("/", "+")
        self.known, self.longest, self.cases = seconds, longest, cases
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.left_out: list[str] = []
        pattern = f"{tree.copy / tree.package}/*"
        self.coverage = coverage.Coverage(
            data_file=str(self.target.with_suffix(".sqlite")), include=[pattern], config_file=False, messages=False
        )
        self.coverage.erase()
        self.coverage.start()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = set(cheapest([i.nodeid for i in items], self.known, self.longest, self.cases))
        self.left_out = [i.nodeid for i in items if i.nodeid not in kept]
        items[:] = [i for i in items if i.nodeid in kept]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.perf_counter() - start
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        passed = {n: round(s, 3) for n, s in self.seconds.items() if n not in self.failed}
        kept = {"files": self.files, "seconds": passed, "not_passed": sorted(self.failed), "left_out": self.left_out}
        self.target.with_suffix(".json").write_text(json.dumps(kept, indent=0))


def cheapest(tests: Sequence[str], seconds: Mapping[str, float], longest: float, cases: int) -> Iterator[str]:
    """Of each function of tests the ``cases`` cheapest ones that take no more than ``longest``."""
    taken: collections.Counter[str] = collections.Counter()
    for test in sorted(tests, key=lambda t: seconds.get(t, 0)):
        function = test.partition("[")[0]
        if seconds.get(test, 0) <= longest and taken[function] < cases:
            taken[function] += 1
            yield test


def record(
    tree: Tree, files: Sequence[str], seconds: Mapping[str, float], longest: float, cases: int, limit: float
) -> Outcome:
    """Record files of tests in one process; only what passed counts as a test afterwards."""
    (tree.folder / "recording").mkdir(exist_ok=True)
    return run_tests(
        tree.copy, files, None, tree.folder, limit, USUAL, lambda: Recorder(tree, files, seconds, longest, cases)
    )


def recorded_files(tree: Tree) -> set[str]:
    return {f for p in (tree.folder / "recording").glob("*.json") for f in json.loads(p.read_text())["files"]}


class Recording:
    """What was recorded, to be asked which tests a fault may concern."""

    def __init__(self, tree: Tree):
        self.tree = tree
        self.data: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self.left_out: dict[str, list[str]] = {}
        for path in sorted((tree.folder / "recording").glob("*.json")):
            kept = json.loads(path.read_text())
            self.seconds.update(kept["seconds"])
            self.left_out[path.stem] = kept["left_out"]
            self.data[path.stem] = path.with_suffix(".sqlite")

    @functools.cache  # noqa: B019
    def lines(self, file: str) -> dict[int, set[str]]:
        """Line of a file of the package -> the tests that execute it; "" is an import."""
        import coverage

        result: dict[int, set[str]] = collections.defaultdict(set)
        path = str(self.tree.copy / self.tree.package / file)
        for database in self.data.values():
            data = coverage.CoverageData(str(database))
            data.read()
            for line, contexts in data.contexts_by_lineno(path).items():
                result[line].update(contexts)
            data.close()
        return result

    def tests(self, fault: Fault) -> list[str]:
        """The tests that execute the fault's place, in the order to run them. Where it runs when the file is imported,
        all that execute anything of the file. The file of tests named like the file comes first; of each function of
        tests the cheapest case, then the second cheapest, and so on."""
        lines = self.lines(fault.file)
        here = set().union(*(lines.get(n, set()) for n in range(fault.line, fault.end_line + 1)))
        here = here or lines.get(fault.statement, set())
        if here == {""}:
            here = set().union(*lines.values())
        return self.ordered(fault, [t for t in here if t in self.seconds])

    def ordered(self, fault: Fault, tests: Sequence[str]) -> list[str]:
        cases: dict[str, list[str]] = collections.defaultdict(list)
        for test in sorted(tests, key=lambda t: (self.seconds[t], t)):
            cases[test.partition("[")[0]].append(test)
        turn = {t: n for group in cases.values() for n, t in enumerate(group)}
        stem = pathlib.PurePath(fault.file).stem.strip("_")

        def key(test: str) -> tuple:
            named = stem in pathlib.PurePath(test.partition("::")[0]).stem
            return turn[test] > 2, not named, turn[test], self.seconds[test], test

        return sorted(tests, key=key)
