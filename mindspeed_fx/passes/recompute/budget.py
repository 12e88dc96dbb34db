"""``memory_budget``: the step fits, at little extra time.

Bytes: the modelled peak, inputs included, is at most the budget less :data:`UNSEEN`. A fraction f: the modelled peak is
at most least + f * (most - least), where *most* is the peak of the plan without a budget and *least* the smallest peak
of any plan on the hull of time against memory; 1.0 is that plan itself. "min": the least. Plans are found by
:mod:`mindspeed_fx.passes.recompute.solve.budget_search`, certified on request (option "certify"); times are the cost
model's (:mod:`mindspeed_fx.cost`).
Deterministic, so that all ranks of one model find the same plan.

The peak counts everything the graph holds at once: its inputs (parameters, batch), activations, gradients. Optimizer
states and other graphs of the model are not in it.
"""

from __future__ import annotations

import math

import torch.fx as fx

from mindspeed_fx.cost.hardware import detect, hardware
from mindspeed_fx.errors import OptionError
from mindspeed_fx.graph.provenance import module_path
from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.recompute.problem import activation_table
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow, record, saved_names
from mindspeed_fx.passes.recompute.problem.joint_graph import JointGraph
from mindspeed_fx.passes.recompute.problem.policies import Fixed, fix_by_policy
from mindspeed_fx.passes.recompute.problem.remat_problem import Plan
from mindspeed_fx.passes.recompute.solve.budget_search import Search
from mindspeed_fx.passes.recompute.solve.offload_moves import offloads, places
from mindspeed_fx.passes.recompute.solve.whole_step import FEW, WholeStep
from mindspeed_fx.report.memory import pareto

NAME = "recompute.budget"

UNSEEN = 1 / 32
"""Part of a budget in bytes kept free for workspaces of other libraries' kernels, which :mod:`step` does not see
(measured: up to 3 % of a small Llama's step on cpu)."""

MIB = 2**20


@register(NAME)
def budget(gm: fx.GraphModule, context: Context) -> PassReport:
    """A memory budget: saves what fits, and recomputes the rest in the backward."""
    report, asked = PassReport(NAME), context.options.memory_budget
    if asked is None:
        return report
    tape = record(gm.graph, context.nodes)
    step = _step(gm, context, tape)
    if isinstance(step, str):
        if isinstance(asked, float):
            report.skipped.append(
                skip(
                    "",
                    next(iter(gm.graph.nodes)),
                    f"{step}; torch's knapsack decides, which bounds the bytes that are saved and not the peak",
                )
            )
            return report
        raise OptionError(
            f'option "memory_budget" is {asked!r}, but the memory of this graph cannot be planned: {step}; valid here: '
            "a fraction"
        )
    decided = fix_by_policy(tape, context.options.recompute or {}, context.options.strict, report)
    _fix(step, decided)
    search = WholeStep(step.schedule, step.unplanned)
    if search.empty:
        raise OptionError(
            f'option "memory_budget" is {asked!r}, but this graph\'s backward needs values that can be neither saved '
            "nor recomputed"
        )
    moves = offloads(step, search, context.options, decided, report) if context.options.offload else None
    least = moves.least() if moves else search.least
    limit = _limit(asked, search, least, step.inputs)
    plan, bound = search.best(limit), None
    if plan and context.options.certify:
        plan, bound = _certify(search, limit, plan, step, report)
    plan = moves.best(limit, plan) if moves else plan
    if plan is None and least.bytes <= limit:
        plan = least
    if plan is None:
        raise OptionError(_infeasible(int(asked), least, step))
    report.moves = places(step, plan)
    for v in moves.left(plan) if moves else ():
        report.skipped.append(
            skip(
                "",
                step.nodes[v],
                f"{module_path(step.nodes[v]) or 'the model'}: is not moved to host memory, since nothing in the "
                "backward reads it",
            )
        )
    report.saved = saved_names(gm.graph, context.nodes, {step.nodes[i] for i in plan.saved})
    report.rewrites = [site("recomputed", step.nodes[i]) for i in plan.recompute if step.schedule.size[i]] + [
        site("offloaded", step.nodes[v]) for v, _, _ in plan.moves
    ]
    report.notes = [
        _peaks(plan, search, least, step),
        _times(plan, step, 0.0 if moves and bound is not None else bound),
        *([moves.told(plan)] if moves else []),
        *report.notes,
    ]
    activation_table.show(
        report,
        step,
        {"saving everything": search.richest, "this plan": plan},
        {step.number[v.node]: why for v, why in decided.why.items()},
        planned=True,
    )
    report.pareto = [(step.seconds + seconds, bytes_ + step.inputs) for seconds, bytes_ in search.points()]
    report.files["pareto.txt"] = pareto(report.pareto)
    return report


def _step(gm: fx.GraphModule, context: Context, tape: Dataflow | str) -> JointGraph | str:
    """The graph as numbers, or why it cannot be planned."""
    options = context.options
    if isinstance(tape, str):
        return tape
    if options.hardware is None:
        return f'planning needs times, and option "hardware" is None: {detect(options.target)[1]}'
    return JointGraph(
        gm, context.nodes, tape, hardware(options.hardware), options.codegen == "inductor", options.target
    )


def _fix(step: JointGraph, decided: Fixed) -> None:
    """What the user decided is no choice: what is to be recomputed cannot be saved, what is to be saved must not run
    again.
    """
    for v in decided.recompute:
        step.schedule.must_recompute[step.number[v.node]] = True
        if step.unplanned[step.number[v.made_by.node]] == math.inf:
            step.unplanned[step.number[v.made_by.node]] = step.schedule.seconds[step.number[v.made_by.node]]
    for v in decided.save:
        for prices in (step.schedule.seconds, step.unplanned):
            prices[step.number[v.made_by.node]] = math.inf


def _limit(asked: float | int | str, search: Search, least: Plan, inputs: int) -> int:
    """The budget in bytes of modelled peak beyond the inputs."""
    if asked == "min":
        return least.bytes
    if isinstance(asked, float):
        return search.least.bytes + int(asked * (search.richest.bytes - search.least.bytes))
    return int((asked - inputs) * (1 - UNSEEN))


def _infeasible(asked: int, least: Plan, step: JointGraph) -> str:
    smallest, node = int(least.bytes / (1 - UNSEEN)) + 1 + step.inputs, step.nodes[least.at]
    return (
        f'option "memory_budget" is {asked} bytes ({asked / MIB:.1f} MiB); the smallest this graph can do is '
        f"{smallest} bytes ({smallest / MIB:.1f} MiB): "
        f"{step.inputs / MIB:.1f} MiB of parameters and inputs, and {least.bytes / MIB:.1f} MiB at {node.name} "
        f"({node.target}) of {module_path(node) or 'the model'}"
    )


def _peaks(plan: Plan, search: Search, least: Plan, step: JointGraph) -> str:
    mib = lambda p: f"{(p.bytes + step.inputs) / MIB:.1f} MiB"  # noqa: E731
    return (
        f"modelled peak {mib(plan)}, of which {step.inputs / MIB:.1f} MiB parameters and inputs; saving everything "
        f"takes {mib(search.richest)}; the least is {mib(least)}"
    )


def _certify(search: WholeStep, limit: int, plan: Plan, step: JointGraph, report: PassReport) -> tuple[Plan, float]:
    """Option "certify": a plan at least as fast, and seconds that no plan within the limit can beat."""
    try:
        better, proved = search.certified(limit, plan)
    except ImportError as error:
        raise OptionError(
            'option "certify" is True, but scipy, whose HiGHS solves its programs, is not installed: pip install '
            '"mindspeed-fx[plans]"'
        ) from error
    if proved is None:
        report.skipped.append(
            skip(
                "certify",
                step.nodes[plan.at],
                f"not certified by integer programs: the step has {len(search.small.values)} values, and they are "
                f"solved for up to {FEW}",
            )
        )
    return better, max(search.bound(limit) or 0.0, proved or 0.0)


def _times(plan: Plan, step: JointGraph, bound: float | None) -> str:
    """Modelled time of the plan; with a bound (0 where plans may move values, of which none knows) what no plan under
    the limit can beat, and the gap between the two.
    """
    whole = step.seconds + plan.seconds
    what = "recomputed and for copies that nothing hides" if plan.moves else "recomputed"
    told = f"modelled step {whole * 1e3:.3f} ms, {plan.seconds * 1e3:.3f} ms of it for what is {what}"
    if bound is None:
        return told
    least = step.seconds + min(bound, plan.seconds)
    return (
        f"{told}; no plan within this peak takes less than {least * 1e3:.3f} ms, so this one is at most "
        f"{(whole / least - 1) * 100:.2f} % from the optimum"
    )
