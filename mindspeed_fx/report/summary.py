"""What ``print(report)`` shows: the answer in a few lines, then what was rewritten, what was left and why, and last the
passes that had nothing to do, all in 100 columns.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from mindspeed_fx.cost.training import modelled_step
from mindspeed_fx.report import measured
from mindspeed_fx.report.answers.base import mib, ms
from mindspeed_fx.report.facts import step_totals
from mindspeed_fx.report.families import KINDS
from mindspeed_fx.report.modelled import estimates

WIDTH = 100
FEW = 5
"""Reasons shown for each pass that left something."""


def text(report: Any) -> str:
    """The whole text of a :class:`mindspeed_fx.planning.explain.Report`."""
    names = list(dict.fromkeys(run.report.name for g in report.graphs for run in g.runs))
    active = [n for n in names if report.sites(n) or report.skipped(n)]
    parts = [
        head(report, names),
        _measured(report),
        *(_of_pass(report, n) for n in active if report.sites(n)),
        *(_of_pass(report, n) for n in active if not report.sites(n)),
        _idle(report),
        str(report.cost) if report.graphs else "",
    ]
    return "\n".join(part for part in parts if part)


def _measured(report: Any) -> str:
    return "" if report.measured is None else "\n".join([*_wrapped("", measured.lines(report.measured)), ""])


def head(report: Any, names: Sequence[str]) -> str:
    """Graphs and breaks, sites by kind, and the modelled forward before and after."""
    graphs, breaks = report.graph_count, len(report.break_reasons)
    lines = [f"{graphs} graph{'s' * (graphs != 1)}, {breaks} graph break{'s' * (breaks != 1)}"]
    lines += _wrapped("  break: ", report.break_reasons)
    kinds = [line for kind, passes in KINDS.items() if (line := _kind(report, kind, set(passes) & set(names)))]
    if kinds:
        lines += _wrapped("fused: ", [", ".join(kinds)])
    rewrites = sum(report.counts.values())
    left = sum(len(report.skipped(n)) for n in names)
    lines += [f"{rewrites} rewrites, {left} near misses"] if names else []
    rows = report.cost.rows() if report.graphs else []
    before, after = (_sums([r for r in rows if r["stage"] == stage]) for stage in ("captured", "forward"))
    if before["seconds"] and after["seconds"]:
        lines.append(
            f"forward, modelled: {before['seconds'] * 1e6:,.0f} -> {after['seconds'] * 1e6:,.0f} us, "
            f"{before['kernels']} -> {after['kernels']} kernels, "
            f"{before['bytes'] / 1e6:,.1f} -> {after['bytes'] / 1e6:,.1f} MB read and written"
        )
    lines += _wrapped("", [step]) if (step := _step(report)) else []
    lines += _wrapped("most to gain, modelled: ", [most] if (most := _most_to_gain(report)) else [])
    return "\n".join([*lines, ""])


def _step(report: Any) -> str:
    """The modelled step and its peak, at level 0 too where that was modelled, and how far the model was off where the
    step was measured."""
    totals = step_totals(report.graphs)
    if not totals["seconds"]:
        return ""
    forms = report.graphs[0].what_if
    before = next((v for v in forms.variants if v.name == "level 0" and not v.error), None) if forms else None
    hw = next(iter(estimates(report.graphs[0]).values())).hardware
    words = f"step, modelled: {modelled_step(hw, totals['seconds'])}, peak {mib(totals['peak'])}"
    words += f"; at level 0 {ms(before.seconds)}, peak {mib(before.peak)}" if before else ""
    compiled = next((s for s in report.measured.steps if s.name == "compiled"), None) if report.measured else None
    if compiled is not None and compiled.seconds and compiled.modelled_seconds:
        error = compiled.modelled_seconds / compiled.seconds - 1
        words += f"; measured {ms(compiled.seconds)}: the model is off by {error:+.0%}"
    return words


def _most_to_gain(report: Any) -> str:
    """The one change that would help most; "" where nothing would, or nothing is modelled."""
    rows = report.gains
    if not rows:
        return ""
    best, step = rows[0], step_totals(report.graphs)["seconds"]
    share = f" ({best.seconds / step:.0%})" if step else ""
    bound = "at most " if best.is_bound else ""
    return f"{bound}{ms(best.seconds)}{share}, {best.what}: {best.reason}"


def _kind(report: Any, kind: str, passes: Iterable[str]) -> str:
    """ "32 of 32 attention"; "" where none was seen."""
    done = sum(len(report.sites(n)) for n in passes)
    seen = done + sum(len(report.skipped(n)) for n in passes)
    return f"{done} of {seen} {kind}" if seen else ""


def _sums(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {what: sum(r[what] for r in rows) for what in ("seconds", "kernels", "bytes")}


def _of_pass(report: Any, name: str) -> str:
    """One pass with its notes, and the reasons of what it left, the most frequent first."""
    sites, skipped = len(report.sites(name)), report.skipped(name)
    line = f"{name:<36}{sites:>5} rewrites{len(skipped):>6} near misses"
    reasons = Counter(s.reason for s in skipped)
    lines = [line, *_wrapped("    ", [f"{stage}: {note}" for stage, note in _notes(report, name)])]
    lines += _wrapped("    ", _proofs(report, name))
    lines += _wrapped("    ", [f"{n} x {reason}" for reason, n in reasons.most_common(FEW)])
    if len(reasons) > FEW:
        lines.append(f"    and {len(reasons) - FEW} further reasons: report.skipped({name!r})")
    return "\n".join(lines)


def _proofs(report: Any, name: str) -> list[str]:
    """With ``check="prove"``: how many sites are proved, and why others are not."""
    proofs = [p for g in report.graphs for r in g.runs if r.report.name == name for p in r.proofs]
    if not proofs:
        return []
    states = Counter(p.status for p in proofs)
    reasons = Counter(f"{p.status}, not proved: {p.reason}" for p in proofs if p.reason)
    counts = ", ".join(f"{n} {state}" for state, n in states.most_common())
    return [f"check: {counts}", *(f"{n} x {reason}" for reason, n in reasons.most_common(FEW))]


def _notes(report: Any, name: str) -> list[tuple[str, str]]:
    return [(r.stage, note) for g in report.graphs for r in g.runs if r.report.name == name for note in r.report.notes]


def idle_passes(report: Any) -> dict[str, list[str]]:
    """Passes without a site and without a near miss -> the reasons that they gave."""
    names = dict.fromkeys(run.report.name for g in report.graphs for run in g.runs)
    idle = [n for n in names if not report.sites(n) and not report.skipped(n)]
    return {name: list(dict.fromkeys(note for _, note in _notes(report, name))) for name in idle}


def _idle(report: Any) -> str:
    """One line, however many they are."""
    count = len(idle_passes(report))
    return f"\nnothing to do: {count} passes; report.idle and the page say why\n" if count else ""


def _wrapped(indent: str, texts: Iterable[str]) -> list[str]:
    inside = " " * (len(indent) + 2)
    keep = {"break_long_words": False, "break_on_hyphens": False}
    return [
        line for t in texts for line in textwrap.wrap(t, WIDTH, initial_indent=indent, subsequent_indent=inside, **keep)
    ]
