"""The checks in a process of their own, which a broken kernel may end, or never end: another goes on after it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time

CHECK_SECONDS = 180.0
"""One check, compiling included, after which its process is ended."""
GRACE = 30.0
"""Seconds beyond the limit for the check that is running then, and for the file."""
OWN_ENDS = (0, 1, 2)
"""Exit statuses of a command that has ended by itself: fine, failures, wrong usage."""


def run(
    words: list[str],
    out: str,
    minutes: float,
    program: tuple[str, ...] = (sys.executable, "-m", "mindspeed_fx.cli"),
    check_seconds: float = CHECK_SECONDS,
) -> int:
    """Run ``mindspeed-fx words`` until its checks are done or the time is over.

    Args:
        words: of the command, without ``--minutes``.
        out: its file, whose journal lies beside.
        minutes: for all processes together.
        program: what starts the command.
        check_seconds: that one check may take.

    Returns:
        0, with the file written; 2 for wrong usage, of which the command has told.
    """
    end = time.monotonic() + 60 * minutes
    journal = pathlib.Path(out + ".journal")
    while True:
        left = max((end - time.monotonic()) / 60, 1e-3)  # with no time left the process writes the file and ends
        process = subprocess.Popen([*program, *words, f"--minutes={left}"], stdout=subprocess.DEVNULL)
        code = _wait(process, journal, end + GRACE, check_seconds)
        if code in OWN_ENDS:
            return 2 if code == 2 else 0
        words = [w for w in words if w != "--fresh"]
        if _pending(journal) is None:
            raise OSError(f"verify-device: its process ended with status {code} before the first check")


def _wait(process: subprocess.Popen, journal: pathlib.Path, end: float, check_seconds: float) -> int:
    """The exit status of the process, which is ended when one check takes too long or all do."""
    key, since = None, time.monotonic()
    while True:
        try:
            return process.wait(0.5)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        running = _pending(journal)
        if running != key:
            key, since = running, now
        if key is not None and (now - since > check_seconds or now > end):
            process.kill()
            process.wait()
            print(f"{key}: ended after {now - since:.0f} s", file=sys.stderr)
            return -9


def _pending(journal: pathlib.Path) -> str | None:
    """The check that was begun last and has no result."""
    try:
        with journal.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 65536, 0))
            last = file.read().decode(errors="replace").splitlines()[-1]
        return json.loads(last).get("start")
    except (OSError, ValueError, IndexError):
        return None
