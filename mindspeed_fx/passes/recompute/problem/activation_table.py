"""What a plan keeps and recomputes, for reports: a table of activations, and memory over the step."""

from __future__ import annotations

from typing import Mapping

from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.passes.base import PassReport
from mindspeed_fx.passes.recompute.problem.joint_graph import JointGraph
from mindspeed_fx.passes.recompute.problem.remat_problem import Plan
from mindspeed_fx.report import memory
from mindspeed_fx.report.source import source_line

MIB = 2**20


def show(
    report: PassReport, step: JointGraph, plans: Mapping[str, Plan | None], why: Mapping[int, str], planned: bool
) -> None:
    """Adds to ``report`` the table of the last of ``plans`` and the memory curves of all.

    Args:
        plans: title -> plan; those that are None are left out.
        why: node -> who decided, where that was a wish of the user.
        planned: a planner decided the rest; False: it is saved because nobody named it.
    """
    shown = {title: p for title, p in plans.items() if p is not None}
    plan = list(shown.values())[-1]
    rows = table(step, plan, why, planned)
    curves = {title: curve(step, p) for title, p in shown.items()}
    saved = sum(r.bytes for r in rows if r.decision == "save")
    peak = curves[list(shown)[-1]]
    report.notes.append(
        f"saved for the backward {saved / MIB:.2f} MiB; recomputed {len(report.rewrites) - len(plan.moves)} calls; "
        f"modelled peak {peak.peak / MIB:.2f} MiB at {peak.where}"
    )
    report.files["activations.md"] = memory.markdown(rows)
    report.files["memory.svg"] = memory.picture(curves)
    report.curves = curves


def table(step: JointGraph, plan: Plan, why: Mapping[int, str], planned: bool) -> list[memory.Activation]:
    """Every activation that the backward may need, largest first."""
    schedule, again, away = step.schedule, set(plan.recompute), {v for v, _, _ in plan.moves}
    read = {schedule.root[i] for i in schedule.needed}
    returned = {schedule.root[i] for i in schedule.returned}
    rows = []
    for v in schedule.values:
        if not schedule.saved_bytes[v]:
            continue
        node = step.nodes[v]
        if v in away:
            decision, reason = "offload", "in host memory between its last reader and its next"
        elif v in plan.saved:
            decision, reason = "save", _saved_rows(v, step, returned, planned)
        elif v in again:
            decision, reason = (
                "recompute",
                "checkpointed region"
                if schedule.must_recompute[v]
                else f"recomputed in {schedule.seconds[v] * 1e6:.1f} us"
                if schedule.seconds[v]
                else "recomputed for nothing",
            )
        elif v in read:
            continue
        else:
            decision, reason = "drop", "nothing that the backward recomputes reads it"
        rows.append(
            memory.Activation(
                node.name,
                str(node.target),
                schedule.saved_bytes[v],
                module_path(node),
                source_line(node),
                decision,
                why.get(v, reason),
            )
        )
    return sorted(rows, key=lambda r: -r.bytes)


def _saved_rows(v: int, step: JointGraph, returned: set[int], planned: bool) -> str:
    if v in returned:
        return "the caller gets it"
    if step.schedule.seconds[v] == float("inf"):
        return "must not be recomputed"
    if not planned:
        return "no policy or glob names it"
    return "fits, and is dearer to make again" if step.schedule.seconds[v] else "fits"


def curve(step: JointGraph, plan: Plan) -> memory.Curve:
    """Bytes alive over the step, inputs included."""
    run, alive, cut = step.schedule.trace(plan)
    labels = [(module_path(step.nodes[i]), str(step.nodes[i].target)) for i in run]
    return memory.Curve([a + step.inputs for a in alive], labels, cut, step.inputs)
