"""``python -m tests.versions [tests]``: the usual tests, or those named, with other versions; a table at the end.

Environments are made in build/versions and kept; one whose packages cannot be had is listed with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

from tests.versions.environments import MATRIX, ROOT, Missing, Versions, make


@dataclass
class Row:
    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""
    failures: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.passed > 0 and not self.failed


def read_report(name: str, path: Path, seconds: float) -> Row:
    """Counts of a JUnit file; a run that wrote none broke before its first test."""
    if not path.exists():
        return Row(name, seconds=seconds, note="pytest did not run")
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    names = tuple(f"{c.get('classname')}::{c.get('name')}" for c in bad)
    return Row(name, len(cases) - len(bad) - len(skipped), len(bad), len(skipped), seconds, "", names)


def run(versions: Versions, folder: Path, tests: Sequence[str]) -> Row:
    try:
        python = make(versions, folder)
    except Missing as error:
        return Row(versions.name, note=str(error))
    report = folder / f"{versions.name}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-m", "not slow and not cuda", f"--junitxml={report}", "-p", "no:cacheprovider"]
    start = time.monotonic()
    environment = {"CI": "1", "OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    if versions.python != "{}.{}".format(*sys.version_info):
        environment.pop("MINDSPEED_FX_TRITON", None)  # made for this Python
    with (folder / f"{versions.name}.txt").open("w") as log:
        subprocess.run([*map(str, command), *tests], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return read_report(versions.name, report, time.monotonic() - start)


def table(rows: Sequence[Row]) -> str:
    lines = ["| versions | passed | failed | skipped | seconds | |", "|---|---|---|---|---|---|"]
    for r in rows:
        lines.append(f"| {r.name} | {r.passed} | {r.failed} | {r.skipped} | {r.seconds:.0f} | {r.note} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("tests", nargs="*", help="files of tests; default: all")
    parser.add_argument("--only", action="append", metavar="NAME", help="this one of the list; again for more")
    parser.add_argument("--list", action="store_true", help="print the names and run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / "build/versions")
    parser.add_argument("--drop", action="store_true", help="remove each environment after its run")
    options = parser.parse_args(arguments)
    chosen = [v for v in MATRIX if not options.only or v.name in options.only]
    if options.only and len(chosen) < len(options.only):
        parser.error(f"valid names: {', '.join(v.name for v in MATRIX)}")
    if options.list:
        print("\n".join(v.name for v in chosen))
        return 0
    rows = []
    for versions in chosen:
        rows.append(run(versions, options.folder, options.tests))
        print(table(rows[-1:]).splitlines()[-1], *rows[-1].failures, sep="\n  ", flush=True)
        if options.drop:
            shutil.rmtree(options.folder / versions.name, ignore_errors=True)
    print(f"\n{table(rows)}")
    return 0 if all(r.ok for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
