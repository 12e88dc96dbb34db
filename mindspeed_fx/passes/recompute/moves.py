"""Moves to host memory of a real graph: what the options allow, and where the copies of a plan go, by names of nodes."""

from __future__ import annotations

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.options import Options
from mindspeed_fx.partition.offload import Move
from mindspeed_fx.passes.recompute.offload import Offload
from mindspeed_fx.passes.recompute.schedule import Plan
from mindspeed_fx.passes.recompute.search import Search
from mindspeed_fx.passes.recompute.step import Step


def offloads(step: Step, search: Search, options: Options) -> Offload:
    """The search for moves under options "host_bandwidth" and "host_memory"."""
    return Offload(search, step.movable, float(options.host_bandwidth or hardware(options.hardware).host_bandwidth), options.host_memory)


def places(step: Step, plan: Plan) -> dict[str, Move]:
    """Name of each value that is moved -> where its copies are waited for and started."""
    run, _, cut = step.schedule.trace(plan)
    return {step.nodes[v].name: Move(None if free >= cut else step.nodes[run[free]].name, None if back <= cut else step.nodes[run[back]].name) for v, free, back in plan.ways}
