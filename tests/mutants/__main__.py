"""``python -m tests.mutants``: faults planted by a seed, and the tests that should see them.

record [files of tests]   which test executes which line, once (--minutes: goes on at the next call)
run                       mutants, until the time is over; goes on where it was
show N ...                the fault of these numbers (of the seed's order)
table                     what came of it, as Markdown
"""

from __future__ import annotations

import argparse
import difflib
import pathlib
import sys
import time
from typing import Mapping, Sequence

from tests import slow_cases
from tests.mutants import table
from tests.mutants.campaign import run_fault, store, stored
from tests.mutants.faults import Fault, plant
from tests.mutants.process import WARM, warm
from tests.mutants.recording import LEFT_OUT, Recording, record, recorded_files
from tests.mutants.sample import ROOMS, choose, faults_of, shares
from tests.mutants.tree import Tree

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = "benchmarks/results/mutants.jsonl"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("command", choices=("record", "run", "show", "table"))
    result.add_argument("what", nargs="*", help="record: files of tests; run and show: numbers of mutants")
    result.add_argument("--root", type=pathlib.Path, default=ROOT, help="the checkout")
    result.add_argument("--package", default="mindspeed_fx")
    result.add_argument("--rooms", nargs="+", default=ROOMS, help="folders or files of the package; . is all of it")
    result.add_argument("--folder", type=pathlib.Path, help="for copy and recording; build/mutants of the root")
    result.add_argument("--results", type=pathlib.Path, help="one line a mutant, kept with the project; a run goes on")
    result.add_argument("--anew", action="store_true", help="copy the package anew and forget what was recorded")
    result.add_argument("--minutes", type=float, default=1e9, help="when to begin no further one")
    result.add_argument("--seed", type=int, default=22)
    result.add_argument("--count", type=int, default=300)
    result.add_argument("--limit", type=float, default=120.0, help="seconds a mutant or a recorded batch may take")
    result.add_argument("--most", type=float, default=60.0, help="seconds that a mutant's tests took when recorded")
    result.add_argument("--tests", nargs="+", default=(), help="run: files or functions, not those recorded")
    result.add_argument("--batch", type=int, default=8, help="record: files of tests that share a process")
    result.add_argument("--durations", type=pathlib.Path, help="record: pytest's table of a run before")
    result.add_argument("--longest", type=float, default=3.0, help="record: leaves out what took longer in that run")
    result.add_argument("--cases", type=int, default=10**9, help="record: the cheapest cases of each function of tests")
    result.add_argument("--warm", nargs="*", default=WARM, help="modules imported once for all")
    result.add_argument("--write", type=pathlib.Path, help="table: the file")
    return result


def record_all(tree: Tree, files: Sequence[str], known: Mapping[str, float], options: argparse.Namespace) -> None:
    """Record what is not recorded yet, in the order of ``files``; named files anew."""
    end = time.monotonic() + 60 * options.minutes
    recorded = recorded_files(tree)
    remaining = list(files) or [f for f in _files(tree) if f not in recorded]
    while remaining and time.monotonic() < end:
        batch, remaining = remaining[: options.batch], remaining[options.batch :]
        outcome = record(tree, batch, known, options.longest, options.cases, options.limit)
        why = f": {outcome.test} {outcome.message}" if outcome.status != "passed" else ""
        print(f"{outcome.status} {' '.join(batch)} {outcome.ran} tests, {outcome.seconds:.0f} s{why}", flush=True)


def _files(tree: Tree) -> list[str]:
    """Files of tests; those of the rooms before the others."""
    files = [p.relative_to(tree.copy).as_posix() for p in sorted(tree.copy.glob("test*/**/test_*.py"))]
    near = tuple(f"tests/{room}" for room in ROOMS)
    return sorted((f for f in files if not f.startswith(LEFT_OUT)), key=lambda f: not f.startswith(near))


def run_all(tree: Tree, chosen: Sequence[Fault], options: argparse.Namespace) -> None:
    """Run what has no result yet; mutants named by number again."""
    end = time.monotonic() + 60 * options.minutes
    recording, file = Recording(tree), options.results
    results = stored(file)
    numbers = [int(n) for n in options.what] or [
        n for n, f in enumerate(chosen) if f.name not in results or results[f.name].status == "not executed"
    ]
    for n in numbers:
        if time.monotonic() > end:
            return
        result = run_fault(tree, recording, chosen[n], options.limit, options.most, options.tests)
        store(file, result)
        took = f"{result.ran} tests, {result.seconds:.0f} s"
        print(f"{n} {result.status} {result.name} ({took}) {result.test}", flush=True)


def show(tree: Tree, chosen: Sequence[Fault], numbers: Sequence[str], file: pathlib.Path) -> None:
    results, recording = stored(file), Recording(tree)
    for n in numbers or [str(i) for i, f in enumerate(chosen) if f.name in results]:
        fault = chosen[int(n)]
        result = results.get(fault.name)
        source = tree.path(fault).read_text()
        lines = (text.splitlines() for text in (source, plant(source, fault)))
        print(f"{n} {fault.name} [{table.state(result, {})}], {len(recording.tests(fault))} tests execute it")
        print("\n".join(list(difflib.unified_diff(*lines, n=6, lineterm=""))[2:]))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    tree = Tree(options.root.resolve(), options.package, (options.folder or options.root / "build/mutants").resolve())
    options.results = options.results or options.root / RESULTS
    tree.make(options.anew)
    if options.command in ("record", "run"):
        warm(options.warm)
    if options.command == "record":
        known = slow_cases.durations(options.durations.read_text()) if options.durations else {}
        record_all(tree, options.what, known, options)
        return 0
    package = tree.copy / tree.package
    faults = faults_of(package, options.rooms)
    chosen = choose(package, faults, options.count, options.seed)
    if options.command == "run":
        run_all(tree, chosen, options)
    elif options.command == "show":
        show(tree, chosen, options.what, options.results)
    else:
        places = ", ".join(f"{kind} {n}" for kind, n in shares(faults))
        rooms = options.rooms
        where = ", ".join(rooms) if len(rooms) <= len(ROOMS) else f"{len(rooms)} files and folders"
        head = (
            f"`python -m tests.mutants`, seed {options.seed}: {len(chosen)} of {len(faults)} places of faults "
            f"({places}) in {where}, tests of at most {options.longest:g} s."
        )
        equivalent = table.reasons(table.REASONS.read_text())
        text = table.page([(f.name, f.kind) for f in chosen], stored(options.results), equivalent, head)
        if options.write:
            options.write.write_text(text)
        else:
            print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
