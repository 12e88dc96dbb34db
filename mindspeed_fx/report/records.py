"""Plain records of what the compiler did. Log, dump, ``explain``, HTML and tests all read these; nothing here
decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Site:
    """One rewritten place in the model."""

    operator: str
    """What the subgraph became, e.g. "mindspeed::rms_norm"."""
    module: str = ""
    """Path of the module the code belongs to, e.g. "decoder.layers.0.input_layernorm"; "" when unknown."""
    source: str = ""
    """``file:line: code`` of the user's line; "" when unknown."""
    nodes: tuple[str, ...] = ()
    """Names of the graph nodes that were replaced."""


@dataclass(frozen=True)
class Skip:
    """One near miss, with a reason that a user can act on."""

    operator: str
    reason: str
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class SiteProof:
    """What ``check="prove"`` knows of one rewritten place."""

    status: str
    """"proved", "checked" (on values) or "unknown"."""
    reason: str = ""
    """Why there is no proof; "" where there is."""


@dataclass
class PassReport:
    """What one pass did to one graph."""

    name: str
    rewrites: list[Site] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What it found besides, as sentences: modelled times, bounds, hashes."""
    files: dict[str, str] = field(default_factory=dict)
    """File name -> text for the dump; ".svg" is shown in the HTML report."""
    curves: dict[str, Any] = field(default_factory=dict)
    """Stage "partition" alone: title -> :class:`mindspeed_fx.report.memory.Curve`."""
    pareto: list[tuple[float, int]] = field(default_factory=list)
    """Stage "partition" alone: (modelled seconds of the step, peak bytes) of the plans that no other beats in both."""
    saved: list[str] | None = None
    """Stage "partition" alone: names of the nodes that the forward saves; None when the pass leaves that to torch's
    min-cut.
    """
    moves: dict[str, Any] = field(default_factory=dict)
    """Stage "partition" alone: saved value -> :class:`mindspeed_fx.partition.offload.Move`, of those that go to host
    memory meanwhile.
    """
    masks: list[str] = field(default_factory=list)
    """Stage "partition" alone: masks that are saved as bytes, where the forward saves them."""
    layers: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)
    """Stage "lowered" alone: for each kind of layer that became one graph the names of its calls, layer by layer in the
    order in which they run, views left out.
    """

    def note_reason(self, reason: str) -> "PassReport":
        """This report, with the reason why the pass has nothing to do in this graph."""
        self.notes.append(reason)
        return self


@dataclass
class PassRun:
    """One execution of a pass by the pipeline."""

    report: PassReport
    stage: str
    """"captured", "joint", "forward", "backward" or "inference"."""
    seconds: float
    nodes_before: int
    nodes_after: int
    before: str | None = None
    """Readable code before the pass; None unless a dump was asked for."""
    after: str | None = None
    check: str = ""
    """Result of the check, numeric or by proof; "" when it was not asked for."""
    proofs: list[SiteProof] = field(default_factory=list)
    """With ``check="prove"`` one entry for each of ``report.rewrites``."""
    exact: bool | None = None
    """Whether outputs and gradients stay bitwise equal, as the pass declares; None where it did not run."""
    diff: str | None = None
    """The unified diff of the two, once :func:`mindspeed_fx.report.diffs.diff_text` was asked for it."""


@dataclass
class GraphRecord:
    """Everything that happened to one Dynamo graph."""

    index: int
    rank: int
    options: dict[str, Any]
    effective: dict[str, Any]
    """What is in force after all gating: target, codegen, passes in order, caches on or off and why."""
    runs: list[PassRun] = field(default_factory=list)
    stages: dict[str, str] = field(default_factory=dict)
    """Stage name -> readable code, in order; filled when a dump was asked for."""
    calls: dict[str, Any] = field(default_factory=dict)
    """Stage name -> the graph's :class:`mindspeed_fx.cost.read.Calls` at "captured" (before any pass rewrote it), and
    when finished at "forward", "backward" or "inference"; filled when a dump or a report was asked for."""
    estimates: dict[str, Any] = field(default_factory=dict)
    """Stage name -> the :class:`mindspeed_fx.cost.graph.Estimate` for the hardware of the options, once asked for."""
    lanes: dict[str, Any] = field(default_factory=dict)
    """Final graph -> its modelled schedule, a :class:`mindspeed_fx.report.lanes.Lanes`; where ``calls`` has it and
    hardware is known."""
    input_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that the graph is given: "trainable" (leaves that want a gradient) and "other"; and "elements" of the
    former."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Named times: "dynamo", "capture", "passes", "lowering", "codegen" (with "compilers", where other programs compile
    what it generated), "compile" (all of them but Dynamo's); "first step" of the model, on its first graph."""
    lowered: list[dict[str, Any]] = field(default_factory=list)
    """One row per operator call lowered: operator, target, kernel, side, reason when it fell back."""
    kernels: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """"forward", "backward" or "inference" -> "kernel:number" of each kernel that Inductor calls -> the nodes that it
    computes; filled within :func:`mindspeed_fx.compat.inductor.kernels_by_node`."""
    what_if: Any = None
    """The :class:`mindspeed_fx.report.what_if.WhatIf` of the step that this graph is of; None unless asked for."""
    measured: Any = None
    """The :class:`mindspeed_fx.report.measured.Measured` of the step that this graph is of; None unless asked for."""

    logged: int = 0
    """Runs that the log has told of."""
    traced: dict[str, int] = field(default_factory=dict)
    """Artifacts of torch's structured trace that were written -> hash of their text."""
    logged_graphs: int = 0
    """Entries of ``stages`` that the log has shown."""

    @property
    def counts(self) -> dict[str, int]:
        """Pass name -> number of rewrites."""
        totals: dict[str, int] = {}
        for run in self.runs:
            totals[run.report.name] = totals.get(run.report.name, 0) + len(run.report.rewrites)
        return totals
