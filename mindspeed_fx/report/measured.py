"""What ``explain(..., measure=True)`` measured, beside what the cost model says of the same. Plain records and their
texts; :mod:`mindspeed_fx.planning.measure` fills them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Sequence

FEW = 10
"""Kernels that are printed."""
APART = 3
"""Kernels named where the model and the measurement part most."""
SHARE = 0.01
"""Of the time in kernels, below which a kernel is not named there: what is short is mostly the call."""
KERNEL_HEAD = ("kernel", "graph", "module", "calls", "measured us", "modelled us", "measured / modelled")
FAMILY_HEAD = ("rewrites", "sites", "measured gain us", "of the step without", "spread us", "modelled gain us", "note")


@dataclass(frozen=True)
class StepTime:
    """Timings of the step in one form."""

    name: str
    """"eager"; "level 0": no rewrite; "compiled": with the options of the report."""
    seconds: float
    """Median over the rounds."""
    spread: float
    """Distance of the quartiles, in seconds."""
    modelled_seconds: float | None = None
    """Sum over all kernels of the graphs; None where nothing is modelled, as for "eager"."""


@dataclass(frozen=True)
class FamilyGain:
    """What one family of rewrites bought: the step without it against the step with it."""

    family: str
    passes: tuple[str, ...]
    """Those that were off."""
    sites: int
    without_seconds: float = 0.0
    """Median of the step without the family."""
    gain_seconds: float = 0.0
    """Median over the rounds of the difference within one round; above 0 where the rewrites are faster."""
    spread: float = 0.0
    """Distance of the quartiles of those differences, in seconds."""
    modelled_gain_seconds: float | None = None
    error: str = ""
    """Why the step without the family was not measured; "" where it was."""

    @property
    def is_within_spread(self) -> bool:
        """True where the difference is smaller than its spread, so that nothing can be said."""
        return abs(self.gain_seconds) < self.spread


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name, in graphs of one direction, of modules that differ in a number alone."""

    kernel: str
    """As the profiler names it, without the number of a generated kernel."""
    graph: str
    """"forward", "backward" or "inference"."""
    module: str
    """Path with "*" for numbers; "" where its nodes have none."""
    calls: int
    """Of one step."""
    seconds: float
    """Of one step, all calls."""
    modelled_seconds: float | None
    """Of the nodes that these kernels compute; 0 where the model counts them with another kernel, None where nothing
    is modelled."""

    @property
    def ratio(self) -> float | None:
        """Measured over modelled; None where one of them is missing or 0."""
        return self.seconds / self.modelled_seconds if self.modelled_seconds and self.seconds else None


@dataclass
class Measured:
    """The measurement of a step."""

    device: str
    """Type of the device that the step ran on."""
    hardware: str | None
    """What the modelled times are for; None where nothing is modelled."""
    is_here: bool
    """Whether that is the device that the step ran on."""
    has_backward: bool
    rounds: int
    steps: list[StepTime]
    families: list[FamilyGain]
    kernels: list[KernelTime] = field(default_factory=list)
    """Slowest first."""
    profiled_seconds: float = 0.0
    """Of one step under the profiler, from the clock."""
    unmapped: dict[str, float] = field(default_factory=dict)
    """Seconds in kernels that belong to no node of the graphs, by name."""
    unseen_modelled_seconds: float = 0.0
    """Modelled time of nodes for which the profiler has no kernel."""
    timeline: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Kernel, graph ("forward" ...), start and seconds of every kernel of one profiled step; starts count from the
    first."""
    notes: list[str] = field(default_factory=list)

    @property
    def kernel_seconds(self) -> float:
        """Of one step, in all kernels, mapped or not."""
        return sum(k.seconds for k in self.kernels) + sum(self.unmapped.values())

    @property
    def apart(self) -> list[KernelTime]:
        """The kernels, each of at least :data:`SHARE` of the time in kernels, whose measured time is the furthest from
        the modelled one, by ratio."""
        rows = [k for k in self.kernels if k.ratio is not None and k.seconds >= SHARE * self.kernel_seconds]
        return sorted(rows, key=lambda k: -abs(math.log(k.ratio or 1.0)))[:APART]


def head(measured: Measured) -> str:
    """What was measured, in a sentence."""
    what = "forward and backward" if measured.has_backward else "forward"
    modelled = f"modelled for {measured.hardware}" if measured.hardware else "nothing modelled"
    other = "" if measured.is_here or not measured.hardware else ", which is not the device measured"
    return (
        f"{what} on {measured.device}, medians of {measured.rounds} rounds in which all forms of the step take turns "
        f"({modelled}{other})"
    )


def lines(measured: Measured) -> list[str]:
    """The lines of ``print(report)``: forms of the step, gains of families, kernels, what was not mapped."""
    results = [f"measured: {head(measured)}", "  step: " + ", ".join(map(step_text, measured.steps))]
    if measured.families:
        results.append("  what each family of rewrites bought: measured (modelled)")
        results += [f"    {f.family:<16}{f.sites:>5} sites  {_gain(f)}" for f in measured.families]
    if measured.kernels:
        results.append(f"  {coverage(measured)}")
        results += [f"    {_kernel(k)}" for k in measured.kernels[:FEW]]
    if measured.apart:
        results.append("  model and measurement part most in: " + "; ".join(map(_ratio, measured.apart)))
    return results + [f"  note: {note}" for note in measured.notes]


def family_rows(measured: Measured) -> list[tuple[str, ...]]:
    """Rows of :data:`FAMILY_HEAD`."""
    rows: list[tuple[str, ...]] = []
    for f in measured.families:
        if f.error:
            rows.append((f.family, str(f.sites), "", "", "", _us(f.modelled_gain_seconds), f"not measured: {f.error}"))
            continue
        note = "within the spread" if f.is_within_spread else ""
        share = f"{f.gain_seconds / f.without_seconds:.1%}"
        numbers = (_us(f.gain_seconds), share, _us(f.spread), _us(f.modelled_gain_seconds))
        rows.append((f.family, str(f.sites), *numbers, note))
    return rows


def kernel_rows(measured: Measured) -> list[tuple[str, ...]]:
    """Rows of :data:`KERNEL_HEAD`, and one for each name that was not mapped."""
    rows = [
        (k.kernel, k.graph, k.module, str(k.calls), _us(k.seconds), _us(k.modelled_seconds), _times(k))
        for k in measured.kernels
    ]
    return rows + [(name, "not mapped", "", "", _us(s), "", "") for name, s in measured.unmapped.items()]


def markdown(measured: Measured) -> list[str]:
    """The lines of a section of a dump's index.md."""

    def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        return ["", *(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *cells))]

    return [
        f"Measured: {head(measured)}.",
        "",
        *(f"- {step_text(s)}" for s in measured.steps),
        *table(FAMILY_HEAD, family_rows(measured)),
        *(["", f"{coverage(measured)}."] if measured.kernels else []),
        *table(KERNEL_HEAD, kernel_rows(measured)),
        *(["", *(f"- {note}" for note in measured.notes)] if measured.notes else []),
    ]


def step_text(step: StepTime) -> str:
    """One form of the step in a few words."""
    modelled = f", modelled {_ms(step.modelled_seconds)}" if step.modelled_seconds is not None else ""
    return f"{step.name} {_ms(step.seconds)} ms (spread {_ms(step.spread)}{modelled})"


def _gain(f: FamilyGain) -> str:
    modelled = f" ({_ms(f.modelled_gain_seconds)})" if f.modelled_gain_seconds is not None else ""
    if f.error:
        return f"not measured{modelled}: {f.error}"
    text = f"{_ms(f.gain_seconds)}{modelled} ms of {_ms(f.without_seconds)}"
    spread = f"spread {_ms(f.spread)}"
    return f"{text}: within the {spread}" if f.is_within_spread else f"{text}, {spread}"


def coverage(measured: Measured) -> str:
    """How much of the step the kernels are, and how much of them could be mapped."""
    total = measured.kernel_seconds
    mapped = sum(k.seconds for k in measured.kernels)
    text = (
        f"kernels: {_ms(total)} of {_ms(measured.profiled_seconds)} ms under the profiler; "
        f"{mapped / total if total else 0.0:.0%} of it mapped to nodes of the graphs"
    )
    names = list(measured.unmapped)[:3]
    return f"{text}, not {', '.join(names)}{', ...' if len(measured.unmapped) > 3 else ''}" if names else text


def _kernel(k: KernelTime) -> str:
    where = f"{k.graph} {k.module}".strip()
    return f"{_cut(k.kernel, 38):<38} {_cut(where, 26):<26}{k.calls:>4} x{_us(k.seconds):>9} us{_modelled(k):>11}"


def _modelled(k: KernelTime) -> str:
    return f"({_us(k.modelled_seconds)})" if k.modelled_seconds is not None else "(-)"


def _ratio(k: KernelTime) -> str:
    return f"{_cut(k.kernel, 38)} ({f'{k.graph} {k.module}'.strip()}) {_times(k)} of its modelled time"


def _times(k: KernelTime) -> str:
    return f"{k.ratio:.2g} x" if k.ratio is not None else ""


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.3g}" if abs(seconds) < 1 else f"{seconds * 1e3:,.0f}"


def _us(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"
