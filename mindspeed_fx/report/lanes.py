"""When each kernel of a graph runs, and which collectives the compute stream stands still for: plain records, which
:mod:`mindspeed_fx.passes.overlap.model.step_lanes` fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

STEP = ("forward", "backward", "inference")
"""Final graphs of a step, in the order in which they run."""


@dataclass(frozen=True)
class Lanes:
    """The modelled schedule of one final graph; kernel ``k`` is that of the graph's estimate. Seconds."""

    names: tuple[str, ...]
    """"compute", and each level of the network that collectives cross."""
    lane_of: tuple[int, ...]
    start: tuple[float, ...]
    seconds: float
    """When everything is done."""
    exposed: Mapping[int, float] = field(default_factory=dict)
    """Collective -> how long the compute stream stands still for it."""
    reasons: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sent:
    """One collective of a step."""

    name: str
    kind: str
    graph: str
    module: str
    link: str
    bytes: int
    seconds: float
    exposed: float
    reason: str


def collectives(lanes: Mapping[str, Lanes], estimates: Mapping[str, Any]) -> list[Sent]:
    """The collectives of a step, the longest exposed first.

    Args:
        lanes: final graph -> its schedule.
        estimates: stage -> :class:`mindspeed_fx.cost.graph.Estimate`.
    """
    rows = []
    for graph in (s for s in STEP if s in lanes and s in estimates):
        schedule, estimate = lanes[graph], estimates[graph]
        for k, kernel in enumerate(estimate.nodes):
            if schedule.lane_of[k]:
                moved = max(int(estimate.value(kernel.cost.read)), int(estimate.value(kernel.cost.write)))
                rows.append(
                    Sent(
                        kernel.name,
                        kernel.operator.rpartition(".")[2],
                        graph,
                        kernel.module,
                        schedule.names[schedule.lane_of[k]],
                        moved,
                        kernel.seconds,
                        schedule.exposed.get(k, 0.0),
                        schedule.reasons.get(k, ""),
                    )
                )
    return sorted(rows, key=lambda s: -s.exposed)


def step_seconds(lanes: Mapping[str, Lanes]) -> float:
    """Of forward and backward, one after the other."""
    return sum(lanes[graph].seconds for graph in STEP if graph in lanes)


def starts_of(schedule: Lanes) -> Sequence[float]:
    """Start of each kernel in microseconds, to a nanosecond."""
    return [round(s * 1e6, 3) for s in schedule.start]
