"""Where a compilation, a measurement or a search is: one line on a terminal, once it has taken longer than
:data:`DELAY` seconds, gone when it ends.

Nothing is shown and no thread is started where standard error is no terminal (logs, pipes), on ranks other than the
first, and without tqdm; what reports its progress then does one comparison.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Sequence

from mindspeed_fx.compat import distributed

DELAY = 5.0
"""Seconds in which nothing is shown."""
REFRESH = 0.5
"""Seconds between two looks at where things are: a stage may take minutes without saying a word."""
COMPILE = (
    "capture",
    "captured passes",
    "joint passes",
    "planning",
    *(f"{side} {what}" for side in ("forward", "backward") for what in ("passes", "lowering", "codegen")),
)
"""Stages of the compilation of a graph. One without a backward ends before those of that."""


@dataclass
class Task:
    """Something that goes through stages, of which each counts as much as the others."""

    title: str
    stages: Sequence[str]
    stage: str = ""
    position: int = 0
    detail: str = ""
    share_of_stage: float = 0.0

    @property
    def text(self) -> str:
        return f"{self.title}: {self.stage}{f' ({self.detail})' if self.detail else ''}"


class Display:
    """The tasks that are running, each within the one before, as one line.

    Args:
        stream: a terminal.
        now: a clock in seconds.
    """

    def __init__(self, stream: Any, now: Callable[[], float] = time.monotonic):
        self.stream, self.now, self.start = stream, now, now()
        self.tasks: list[Task] = []
        self.is_over = threading.Event()
        self._bar: Any = None
        self._lock = threading.Lock()

    @property
    def share(self) -> float:
        """Of the stages of the outermost task, a task within another being part of the stage in which it runs."""
        share = 0.0
        for task in reversed(self.tasks):
            inside = max(task.share_of_stage, share)
            share = min(1.0, (task.position + inside) / (len(task.stages) or 1))
        return share

    def refresh(self) -> None:
        """Draw, if it is time to."""
        with self._lock:
            if not self.tasks or self.is_over.is_set() or self.now() - self.start < DELAY:
                return
            if self._bar is None:
                from tqdm import tqdm

                form = "{desc} {percentage:3.0f}% |{bar:20}|"
                self._bar = tqdm(total=100, file=self.stream, leave=False, bar_format=form, dynamic_ncols=True)
            self._bar.n = round(100 * self.share)
            words = " | ".join(task.text for task in self.tasks)
            self._bar.set_description_str(f"mindspeed-fx {self.now() - self.start:.0f} s: {words}", refresh=True)

    def close(self) -> None:
        self.is_over.set()
        with self._lock:
            if self._bar is not None:
                self._bar.close()

    def watch(self) -> None:
        """Refresh until it is over."""
        while not self.is_over.wait(REFRESH):
            self.refresh()


_display: Display | None = None


def is_shown() -> bool:
    """Whether progress is shown at all: on a terminal, by the first rank, with tqdm."""
    stream = sys.stderr
    return (
        stream is not None
        and stream.isatty()
        and distributed.rank() == 0
        and os.environ.get("RANK", "0") == "0"
        and importlib.util.find_spec("tqdm") is not None
    )


@contextlib.contextmanager
def task(title: str, stages: Sequence[str]) -> Iterator[None]:
    """Something goes through ``stages``, of which :func:`enter` names the one that begins. Within a task of the same
    title it is that task: a backward may be compiled with its forward, or when it first runs."""
    global _display
    is_running = _display is not None and any(task.title == title for task in _display.tasks)
    if is_running or (_display is None and not is_shown()):
        yield
        return
    is_outermost = _display is None
    if _display is None:
        _display = Display(sys.stderr)
        threading.Thread(target=_display.watch, name="mindspeed_fx progress", daemon=True).start()
    display = _display
    display.tasks.append(Task(title, stages))
    try:
        yield
    finally:
        display.tasks.pop()
        if is_outermost:
            _display = None
            display.close()


def enter(stage: str) -> None:
    """The innermost task has come to ``stage``; one that is not of its stages is shown as part of the one before."""
    if _display is None or not _display.tasks:
        return
    current = _display.tasks[-1]
    current.stage, current.detail, current.share_of_stage = stage, "", 0.0
    if stage in current.stages:
        current.position = current.stages.index(stage)


def note(detail: str, done: int = 0, count: int = 1) -> None:
    """What the stage is doing, and how much of it is done: ``done`` of ``count``."""
    if _display is None or not _display.tasks:
        return
    current = _display.tasks[-1]
    current.detail, current.share_of_stage = detail, done / max(1, count)
