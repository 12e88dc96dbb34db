"""Why a plan has its schedule: what the others would take on the same mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, Iterator

from mindspeed_fx.planning.search.schedules import schedules
from mindspeed_fx.planning.search.solution import Solution, Unsayable
from mindspeed_fx.planning.search.solve import Program

GiB = 2**30


def schedule_reasons(plan: Any) -> list[str]:
    """Lines about the schedule of a searched plan with stages, and about the layers of its stages."""
    if plan.layout.pp == 1:
        return []
    own, layout = plan.solution, plan.layout
    idle = own.parts["bubble"] / own.seconds
    others = [f"{name}:{virtual} {_against(own, other, plan)}" for name, virtual, other in _others(plan)]
    stages = f"{layout.virtual} stage{'s' * (layout.virtual > 1)} a rank"
    rest = ", ".join(others) or "there is no other"
    lines = [f"schedule: {layout.schedule}, {stages}, idle for {idle:.1%} of the step; on this mesh {rest}"]
    if own.layers:
        sizes = "+".join(map(str, own.layers))
        lines.append(f"layers of the stages: {sizes}, as equal as can be by number {own.even / own.seconds - 1:+.1%}")
    return lines


def _others(plan: Any) -> Iterator[tuple[str, int, Solution | None]]:
    searched = plan.searched
    layers = sum(map(len, searched.problem.runs))
    first: Program | None = None
    for name, virtual in schedules(plan.layout, layers):
        layout = dataclasses.replace(plan.layout, schedule=name, virtual=virtual)
        if layout == plan.layout:
            continue
        program = Program(searched.prices, layout, searched.memory)
        program.priced(first)
        first = first or program
        result = program.solve()
        try:
            yield name, virtual, None if result is None else program.evaluate(result[1], result[0])
        except Unsayable:  # rounding made what cannot be
            continue


def _against(own: Solution, other: Solution | None, plan: Any) -> str:
    if other is None or other.memory > plan.searched.memory * (1 + 1e-9):
        return "does not fit"
    return f"{other.seconds / own.seconds - 1:+.1%}"
