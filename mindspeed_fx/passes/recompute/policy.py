"""Option ``recompute`` without a budget: a named policy, or wishes for single modules, decides what the forward
saves.
"""

from __future__ import annotations

import math
from typing import Any

import torch.fx as fx

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.recompute.pointwise import NAME as POINTWISE
from mindspeed_fx.passes.recompute.problem import activation_table
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow, Value, record, saved_names
from mindspeed_fx.passes.recompute.problem.joint_graph import JointGraph
from mindspeed_fx.passes.recompute.problem.policies import Fixed, fix_by_policy
from mindspeed_fx.passes.recompute.solve.min_cut import cheapest

NAME = "recompute.policy"


def policy_of(asked: Any) -> str:
    """The policy that decides what no glob names."""
    return "auto" if asked is None else asked if isinstance(asked, str) else asked.get("policy", "auto")


@register(NAME)
def apply_policy(gm: fx.GraphModule, context: Context) -> PassReport:
    """Named recompute policies and per-module wishes: what they name is recomputed in the backward, the rest is
    saved.
    """
    report, options = PassReport(NAME), context.options
    asked, policy = options.recompute, policy_of(options.recompute)
    if (
        asked in (None, "auto")
        or options.memory_budget is not None
        or policy == "auto"
        and context.left_to_inductor(POINTWISE)
    ):
        return report  # a planner takes the wishes as they are
    tape = record(gm.graph, context.nodes)
    if isinstance(tape, str):
        if options.strict:
            raise OptionError(f'option "recompute" is {asked!r}, but this graph cannot be planned: {tape}')
        report.skipped.append(skip("", next(iter(gm.graph.nodes)), f"{tape}; torch's min-cut decides"))
        return report
    decided = fix_by_policy(tape, asked, options.strict, report)
    saved = cheapest_saved(tape, decided)
    report.saved = saved_names(gm.graph, context.nodes, {v.node for v in saved})
    step = JointGraph(
        gm,
        context.nodes,
        tape,
        hardware(options.hardware) if options.hardware else None,
        options.codegen == "inductor",
        options.target,
    )
    plan = step.schedule.evaluate({step.number[v.node] for v in saved})
    schedule = step.schedule
    everything = schedule.evaluate(
        {r for i in schedule.needed if not schedule.is_input[r := schedule.root[i]] and schedule.savable[r]}
    )
    if plan is not None:
        report.rewrites = [site("recomputed", step.nodes[i]) for i in plan.recompute if step.schedule.size[i]]
        activation_table.show(
            report,
            step,
            {"saving everything": everything, "this plan": plan},
            {step.number[v.node]: why for v, why in decided.why.items()},
            planned=False,
        )
    return report


def cheapest_saved(tape: Dataflow, decided: Fixed) -> list[Value]:
    """What is saved when nothing but ``decided`` is recomputed: the fewest bytes."""
    again = {v.made_by for v in decided.recompute}
    return cheapest(
        tape,
        lambda o: 1.0 if o in again else 0.0 if not all(v.savable for v in o.outputs) else math.inf,
        lambda v: 0.0 if v.returned else math.inf if v in decided.recompute else 1.0 + v.bytes,
    )
