"""Moves to host memory of a real graph: what the options allow, and where the copies of a plan go, by names of
nodes.
"""

from __future__ import annotations

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.options import Options
from mindspeed_fx.partition.offload import Move, dense
from mindspeed_fx.passes.base import PassReport, skip
from mindspeed_fx.passes.recompute.problem.dataflow import Value
from mindspeed_fx.passes.recompute.problem.joint_graph import JointGraph
from mindspeed_fx.passes.recompute.problem.policies import Fixed
from mindspeed_fx.passes.recompute.problem.remat_problem import Plan
from mindspeed_fx.passes.recompute.solve.budget_search import Search
from mindspeed_fx.passes.recompute.solve.offload import Offload


def offloads(step: JointGraph, search: Search, options: Options, decided: Fixed, report: PassReport) -> Offload:
    """The search for moves under options "host_bandwidth" and "host_memory"; what a wish of the user moves is moved in
    every plan.

    Raises:
        OptionError: the wishes alone take more than "host_memory".
    """
    always = []
    for v in sorted(decided.away, key=lambda v: step.number[v.node]):
        if reason := _stays(v, step):
            report.skipped.append(skip("", v.node, f"{decided.why[v]}: stays on the device: {reason}"))
        else:
            always.append(step.number[v.node])
    taken = sum(step.schedule.saved_bytes[v] for v in always)
    if options.host_memory is not None and taken > options.host_memory:
        raise OptionError(
            f'option "host_memory" is {options.host_memory} bytes, but what option "recompute" maps to "offload" takes '
            f"{taken}; valid: at least that, or fewer modules"
        )
    return Offload(
        search,
        step.movable,
        float(options.host_bandwidth or hardware(options.hardware).host_bandwidth),
        options.host_memory,
        always,
    )


def _stays(v: Value, step: JointGraph) -> str:
    """Why a value cannot be moved; "" when it can."""
    i = step.number[v.node]
    if not step.schedule.savable[i] or not step.schedule.saved_bytes[i]:
        return "it is no tensor in memory"
    if step.schedule.must_recompute[i]:
        return "a checkpointed region makes it again"
    return "" if dense(v.node.meta.get("val")) else "its memory has holes or overlaps"


def places(step: JointGraph, plan: Plan) -> dict[str, Move]:
    """Name of each value that is moved -> where its copies are waited for and started."""
    run, _, cut = step.schedule.trace(plan)
    return {
        step.nodes[v].name: Move(
            None if free >= cut else step.nodes[run[free]].name, None if back <= cut else step.nodes[run[back]].name
        )
        for v, free, back in plan.moves
    }
