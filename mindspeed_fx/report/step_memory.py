"""Memory of a step by its final graphs: which results are alive when, and what is alive at the peak.

What the step is given (parameters, inputs, states of the optimizer) is not counted. A result is alive from the kernel
that makes it to the last that reads it, in the backward if it is saved for it; what a graph returns and no backward
reads, to the end of the step. (Of what is both returned and saved the caller is taken to keep nothing.) Results inside
a fused kernel are never in memory. Modelled from the graphs' sizes, not measured: an allocator's rounding and the
kernels' own workspaces are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from mindspeed_fx.report.memory import Curve


@dataclass(frozen=True)
class Live:
    """One result that is alive at the peak."""

    name: str
    module: str
    operator: str
    bytes: int


@dataclass(frozen=True)
class StepMemory:
    """Attributes: ``curve``, bytes during every kernel; ``live``, what is alive at the peak, largest first."""

    curve: Curve
    live: tuple[Live, ...]


@dataclass
class _Value:
    start: int
    last: int
    bytes: int
    kernel: Any
    name: str


def step_memory(estimates: Mapping[str, Any]) -> StepMemory | None:
    """The memory of a forward and its backward, or of an inference graph; None where there is neither.

    Args:
        estimates: stage -> :class:`mindspeed_fx.cost.graph.Estimate` of the final graphs.
    """
    values: dict[tuple[str, str], _Value] = {}
    labels: list[tuple[str, str]] = []
    ends: dict[tuple[str, str], int] = {}  # of what a graph returns: the first kernel after it
    saved: dict[str, str] = {}  # name in the backward -> key in the forward
    for stage in ("forward", "backward", "inference"):
        if stage not in estimates:
            continue
        estimate, first = estimates[stage], len(labels)
        where = {name: first + k for k, n in enumerate(estimate.nodes) for name in (n.members or (n.name,))}
        labels += [(n.module, n.operator) for n in estimate.nodes]
        for call in estimate.calls.calls:
            if call.name not in where:
                continue
            at = where[call.name]
            for spec in call.reads:
                key = (stage, spec.key) if (stage, spec.key) in values else ("forward", saved.get(spec.key, ""))
                if key in values:
                    values[key].last = max(values[key].last, at)
            for spec in call.writes:
                value = _Value(at, at, int(estimate.value(spec.bytes)), estimate.nodes[at - first], call.name)
                values.setdefault((stage, spec.key), value)
        ends |= {(stage, key): len(labels) for key in estimate.calls.outputs if (stage, key) in values}
        saved = dict(estimate.calls.returned) if stage == "forward" else {}
    for key, end in ends.items():
        if values[key].last < end:  # no later graph reads it: the caller has it
            values[key].last = len(labels)
    return _summed(values, labels, len(estimates["forward"].nodes) if "forward" in estimates else 0) if labels else None


def _summed(values: Mapping[Any, _Value], labels: list[tuple[str, str]], forward: int) -> StepMemory:
    changes = [0] * (len(labels) + 1)
    stored = [v for v in values.values() if v.last > v.start]
    for v in stored:
        changes[v.start] += v.bytes
        if v.last + 1 < len(changes):
            changes[v.last + 1] -= v.bytes
    totals, now = [], 0
    for change in changes[: len(labels)]:
        now += change
        totals.append(now)
    at = max(range(len(totals)), key=totals.__getitem__)
    live = [Live(v.name, v.kernel.module, v.kernel.operator, v.bytes) for v in stored if v.start <= at <= v.last]
    return StepMemory(Curve(totals, labels, forward), tuple(sorted(live, key=lambda x: -x.bytes)))
