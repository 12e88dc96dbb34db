"""Which cases of tests are slow: the usual suite keeps the cheapest case of each function and leaves out dear others.

    make test ARGS="--durations=0 --durations-min=0" | tee suite.log
    python -m tests.slow_cases suite.log

writes ``slow_cases.txt`` anew: cases of :data:`SECONDS` or more in that run beside a cheaper case of the same function,
but not of the files in :data:`WHOLE`, each case of which shows something that no other does. Lines without brackets,
whole functions, are put in by hand and stay. ``conftest.py`` marks what the file names as slow.
"""

from __future__ import annotations

import collections
import pathlib
import re
import sys

import pytest

FILE = pathlib.Path(__file__).with_name("slow_cases.txt")
SECONDS = 3.0
"""Of a run on two cores beside other work; half of it alone."""
WHOLE = (
    "tests/megatron/launch/test_scripts.py",
    "tests/partition/test_unroll.py",
    "tests/docs/",
    "tests/fuzz/",
    "tests/surroundings/",
)


def read() -> frozenset[str]:
    return frozenset(line for line in FILE.read_text().splitlines() if line and not line.startswith("#"))


def mark(items: list[pytest.Item]) -> None:
    """Mark what the file names, and every case of the functions that it names."""
    named = read()
    for item in items:
        if item.nodeid in named or item.nodeid.partition("[")[0] in named:
            item.add_marker(pytest.mark.slow)


def durations(log: str) -> dict[str, float]:
    """Test -> seconds, setup and teardown included, of pytest's table of durations."""
    seconds: dict[str, float] = collections.defaultdict(float)
    for time, test in re.findall(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*?)\s*$", log, re.MULTILINE):
        seconds[test] += float(time)
    return seconds


def dear(seconds: dict[str, float]) -> list[str]:
    """Cases that go, in order of their names."""
    cases: dict[str, list[tuple[float, str]]] = collections.defaultdict(list)
    for test, time in seconds.items():
        cases[test.partition("[")[0]].append((time, test))
    return sorted(
        test
        for function, times in cases.items()
        if not function.startswith(WHOLE)
        for time, test in sorted(times)[1:]
        if time >= SECONDS
    )


def main(log: str) -> None:
    seconds, before = durations(pathlib.Path(log).read_text()), read()
    functions = sorted(name for name in before if "[" not in name)
    # what the file left out of this run is not in it, and stays out
    cases = sorted({*(n for n in before if "[" in n and n not in seconds), *dear(seconds)})
    FILE.write_text("\n".join([HEADER, *functions, "", *cases, ""]))


HEADER = "# Slow beside what the usual suite keeps; written by `python -m tests.slow_cases`. Whole functions by hand:"

if __name__ == "__main__":
    main(sys.argv[1])
