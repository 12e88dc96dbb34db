"""The page of a campaign: counts by kind, survivors with what is to be said of them, and every mutant."""

from __future__ import annotations

import collections
import datetime
import pathlib
from typing import Iterator, Sequence

from tests.mutants.campaign import Result
from tests.mutants.kinds import KINDS

REASONS = pathlib.Path(__file__).with_name("equivalent.txt")
"""Mutants that no test can kill: the name of one in a line, and the reason, indented, in those after it."""

STATES = ("killed", "survived", "equivalent", "not finished", "not executed", "not run")


def reasons(text: str) -> dict[str, str]:
    """Name -> why the mutant is the same program, as far as anybody can see."""
    result: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith(" "):
            result[name] = f"{result[name]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            name = line
            result[name] = ""
    return result


def state(result: Result | None, equivalent: dict[str, str]) -> str:
    if result is None:
        return "not run"
    return "equivalent" if result.status == "survived" and result.name in equivalent else result.status


def page(names: Sequence[tuple[str, str]], results: dict[str, Result], equivalent: dict[str, str], head: str) -> str:
    """Markdown.

    Args:
        names: name and kind of every mutant that was chosen.
        head: what was run, in a sentence or two.
    """
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in KINDS}
    for name, kind in names:
        counts[kind][state(results.get(name), equivalent)] += 1
    total = sum(counts.values(), collections.Counter())
    judged = total["killed"] + total["survived"]
    share = f"{100 * total['killed'] / judged:.1f} %" if judged else "none"
    lines = [
        "# Mutants",
        "",
        f"{head} {datetime.date.today()}.",
        "",
        f"Of {judged} mutants that tests execute, that ended and are no equivalent ones, {total['killed']} were killed "
        f"({share}). {total['equivalent']} are equivalent, {total['not finished']} did not finish in time (not counted "
        f"as killed), {total['not executed']} stand where no recorded test goes, {total['not run']} were not run.",
        "",
        f"| kind | {' | '.join(STATES)} |",
        f"|---|{'---|' * len(STATES)}",
        *(f"| {kind} | {' | '.join(str(c[s]) for s in STATES)} |" for kind, c in counts.items()),
        f"| all | {' | '.join(str(total[s]) for s in STATES)} |",
        "",
        *_section("Survivors", names, results, equivalent, "survived"),
        *_section("Equivalent", names, results, equivalent, "equivalent"),
        *_section("Not finished", names, results, equivalent, "not finished"),
        *_section("Not executed by a recorded test", names, results, equivalent, "not executed"),
        *_section("Killed", names, results, equivalent, "killed"),
    ]
    return "\n".join(lines) + "\n"


def _section(
    title: str,
    names: Sequence[tuple[str, str]],
    results: dict[str, Result],
    equivalent: dict[str, str],
    wanted: str,
) -> Iterator[str]:
    chosen = [results[n] for n, _ in names if n in results and state(results[n], equivalent) == wanted]
    if not chosen:
        return
    yield from (f"## {title}", "", "| mutant | line | tests | seconds | |", "|---|---|---|---|---|")
    for r in chosen:
        what = f"{r.test}: {r.message}" if r.test else equivalent.get(r.name, r.message)
        yield f"| `{_cell(r.name)}` | {r.line} | {r.ran} | {r.seconds:.0f} | {_cell(what)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("`", "'").split())[:300]
