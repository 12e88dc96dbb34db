"""Which faults are planted: the same ones for the same seed and package."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Iterator, Sequence

from tests.mutants.faults import Fault, find_faults, is_another_program
from tests.mutants.kinds import KINDS

ROOMS = ("kernels", "passes", "partition", "sharding", "planning", "cost")

LEFT_OUT = {
    "kernels/triton/": "runs in processes of its own, in Triton's interpreter, where no line is recorded",
    "kernels/npu/emulation/": "stands in for a device in tests; no part of what users run",
    "planning/verify_device/": "the tests of a device, run by other processes",
}
"""Folder -> why nothing is planted there."""

WORDS = ("_svg.py", "page.py", "words.py", "report.py", "command.py", "text.py")
"""Ends of files that write for people: what is wrong there is none of the kinds."""


def is_left_out(file: str) -> bool:
    return file.startswith(tuple(LEFT_OUT)) or file.endswith(WORDS)


def files_of(package: pathlib.Path, rooms: Sequence[str] = ROOMS) -> dict[str, pathlib.Path]:
    """Files of the rooms that faults are planted in, in order; a room may be a file; ``.`` is all of the package."""
    named = [[package / r] if r.endswith(".py") else (package / r).rglob("*.py") for r in rooms]
    files = {p.relative_to(package).as_posix(): p for paths in named for p in paths}
    return {name: files[name] for name in sorted(files) if not is_left_out(name)}


def faults_of(package: pathlib.Path, rooms: Sequence[str] = ROOMS) -> list[Fault]:
    """Every fault of the rooms of the package."""
    return [f for name, path in files_of(package, rooms).items() for f in find_faults(name, path.read_text())]


def choose(package: pathlib.Path, faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """``count`` of them: kinds take turns, and within a kind every place is as likely as another.

    A place has its turn by its own name: what is chosen stays chosen where the package changes elsewhere, so that a
    campaign goes on over many versions.
    """

    def turn(fault: Fault) -> str:
        return hashlib.sha256(f"{seed} {fault.name}".encode()).hexdigest()

    queues = []
    for kind in KINDS:
        here = sorted((f for f in faults if f.kind == kind), key=turn)
        queues.append(f for f in here if is_another_program((package / f.file).read_text(), f))
    chosen: list[Fault] = []
    while queues and len(chosen) < count:
        drawn = [next(q, None) for q in queues]
        queues = [q for q, f in zip(queues, drawn) if f is not None]
        chosen += [f for f in drawn if f is not None]
    return chosen[:count]


def shares(faults: Sequence[Fault]) -> Iterator[tuple[str, int]]:
    """Kind and how many places it has."""
    return ((kind, sum(f.kind == kind for f in faults)) for kind in KINDS)
