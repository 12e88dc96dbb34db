"""Without a budget: what the backward recomputes because keeping it costs more.

On cpu a saved activation costs page faults when it is made and cache misses when it is read, while pointwise work is
fused into what reads it. Measured in benchmarks/results. Elsewhere, and where no code is generated, torch's own min-cut
decides, which never recomputes what the backward would have to write out.
"""

from __future__ import annotations

import math

import torch.fx as fx

from mindspeed_fx.passes.base import Context, PassReport, register, site, skip
from mindspeed_fx.passes.recompute.problem.dataflow import Dataflow, Value, record, saved_names
from mindspeed_fx.passes.recompute.problem.pointwise_costs import prices
from mindspeed_fx.passes.recompute.problem.policies import fix_by_policy
from mindspeed_fx.passes.recompute.solve.min_cut import cheapest

NAME = "recompute.pointwise"


@register(NAME)
def pointwise(gm: fx.GraphModule, context: Context) -> PassReport:
    """On cpu the backward recomputes pointwise results rather than keeping them."""
    report = PassReport(NAME)
    options, wishes = context.options, context.options.recompute
    policy = wishes if isinstance(wishes, str) else (wishes or {}).get("policy", "auto")
    if options.memory_budget is not None or policy != "auto":
        return report.note_reason(
            "memory_budget decides"
            if options.memory_budget is not None
            else f'the policy "{policy}" of option "recompute" decides'
        )
    if (options.target, options.codegen) != ("cpu", "inductor"):
        return report.note_reason(
            f'torch\'s min-cut decides for target "{options.target}" with codegen "{options.codegen}"'
        )
    tape = record(gm.graph, context.nodes)
    if isinstance(tape, str):
        report.skipped.append(skip("", next(iter(gm.graph.nodes)), f"{tape}; torch's min-cut decides"))
        return report
    if all(o.fusible for o in tape.operations):
        # No buffer of another call is there to be used again: what is not kept is allocated once more, for a gradient.
        return report.note_reason("all of it is generated code; torch's min-cut decides")
    again, keep, written = prices(tape)
    decided = fix_by_policy(tape, wishes or {}, context.options.strict, report)
    kept = {v.made_by for v in decided.save}
    saved = cheapest(
        tape,
        lambda o: (
            math.inf
            if o in kept
            else again(o)
            if not any(v in decided.recompute for v in o.outputs)
            else min(again(o), 1.0)
        ),
        lambda v: math.inf if v in decided.recompute else keep(v),
    )
    report.saved = saved_names(gm.graph, context.nodes, {v.node for v in saved})
    report.rewrites = [site("recomputed", v.node) for v in _made_again(tape, saved) if written[v]]
    return report


def _made_again(tape: Dataflow, saved: list[Value]) -> list[Value]:
    """The values that the backward makes, in order."""
    keep, todo, results = set(saved), [v for v in tape.values if v.needed], set()
    while todo:
        v = todo.pop()
        if v not in keep and v not in results:
            results.add(v)
            todo += v.made_by.inputs
    return [v for v in tape.values if v in results]
