"""What a question is given, what an answer is, and an answer as text."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, NamedTuple, Sequence

WIDTH = 100
MIB = 2**20
LAST = 26
"""Letters that the last column of a table has at least, where it needs them."""
LEAST = 16
"""Letters that the others are not cut below."""
FEW = 20
"""Rows of an answer that are printed; JSON and the page have all."""


class Change(NamedTuple):
    """What one pass changed in a graph's code."""

    number: int
    stage: str
    name: str
    diff: str


@dataclass
class Facts:
    """One graph, as its dump has it."""

    values: Mapping[str, Any]
    """The values of metadata.json."""
    changes: Callable[[], list[Change]] = list
    codes: Callable[[], Mapping[str, str]] = dict
    """Stage -> code of a graph."""
    ranks: Callable[[], list[Mapping[str, Any]]] = list
    """The values of all graphs of all ranks."""
    memory: int | None = None
    """Bytes of the device; None: what the hardware's table says."""


@dataclass(frozen=True)
class Answer:
    """Sentences, the shortest answer first, and a table."""

    lines: tuple[str, ...]
    head: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = field(default_factory=tuple)


def text(title: str, answer: Answer) -> str:
    """The answer for a terminal, in :data:`WIDTH` columns."""
    keep = {"break_long_words": False, "break_on_hyphens": False}
    lines = [title]
    for line in answer.lines:
        lines += textwrap.wrap(line, WIDTH, initial_indent="  ", subsequent_indent="    ", **keep)
    return "\n".join([*lines, *_table(answer)])


def _table(answer: Answer) -> list[str]:
    """Columns as wide as their words; the last one takes what is left, over several lines."""
    shown = [answer.head, *answer.rows[:FEW]] if answer.rows else []
    if not shown:
        return []
    widths = [min(40, max(len(row[k]) for row in shown)) for k in range(len(answer.head) - 1)]
    least = min(LAST, max(len(row[-1]) for row in shown))
    while sum(widths) + 2 * len(widths) + least > WIDTH - 2 and max(widths) > LEAST:  # the widest gives way
        widths[widths.index(max(widths))] -= 1
    left = WIDTH - 2 - sum(widths) - 2 * len(widths)
    lines = []
    for row in shown:
        cells = "  ".join(_cut(cell, width).ljust(width) for cell, width in zip(row, widths))
        last = textwrap.wrap(row[-1], left, break_on_hyphens=False) or [""]
        lines.append(f"  {cells}  {last[0]}".rstrip())
        lines += [" " * (4 + sum(widths) + 2 * (len(widths) - 1)) + part for part in last[1:]]
    if len(answer.rows) > FEW:
        lines.append(f"  and {len(answer.rows) - FEW} more: --json, or the page")
    return lines


def _cut(words: str, width: int) -> str:
    return (
        words
        if len(words) <= width
        else f"{words[: width // 2 - 1]}...{words[len(words) - (width - width // 2 - 2) :]}"
    )


def ms(seconds: float) -> str:
    """Seconds as milliseconds with four digits that count."""
    return f"{seconds * 1e3:,.4g} ms" if abs(seconds) < 1 else f"{seconds * 1e3:,.0f} ms"


def mib(count: float) -> str:
    """Bytes with a unit, three digits or more."""
    size = abs(count)
    for unit, name in ((2**30, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{count / unit:,.{max(0, 3 - len(str(int(size / unit))))}f} {name}"
    return f"{count:,.0f} B"


def percent(part: float, whole: float) -> str:
    return f"{part / whole:+.1%}" if whole else ""


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
