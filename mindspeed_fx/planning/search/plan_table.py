"""A searched plan as text: what ``print`` shows."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.planning.search.schedule_reasons import schedule_reasons
from mindspeed_fx.planning.search.to_plan import paddings

GiB = 2**30


def format_plan(plan: Any) -> str:
    """The plan beside its alternatives, kinds of layers and collectives, a line each."""
    o, p = plan.searched.outcome, plan.searched.problem
    hw = plan.searched.prices.hw
    head = (
        f"modelled for {plan.searched.devices} x {hw.name} ({hw.basis}), at most "
        f"{plan.searched.memory / GiB:.1f} GiB a device; certified: no plan of {o.layouts} meshes is faster by "
        f"more than {100 * plan.gap:.2f} %"
    )
    lines = [
        head,
        f"{'tp':>4} {'sp':>3} {'cp':>3} {'dp':>4} {'ep':>3} {'pp':>3} {'micro':>5} {'zero':>6} {'recompute':>24} "
        f"{'step ms':>9} {'GiB':>6} {'exposed ms':>10}  runs",
    ]
    for row in (a.row() for a in plan.alternatives):
        cp = f"{row['cp']}" + (row["attention"][:1] if row["cp"] > 1 else "")
        lines.append(
            f"{row['tp']:>4} {'yes' if row['sp'] else 'no':>3} {cp:>3} {row['dp']:>4} {row['ep']:>3} "
            f"{row['pp']:>3} {row['microbatches']:>5} {row['zero']:>6} {row['recompute']:>24} "
            f"{row['seconds'] * 1e3:>9.1f} {row['bytes'] / GiB:>6.1f} {row['exposed_seconds'] * 1e3:>10.1f}  "
            f"{row['runs']}"
        )
    low, high = plan.interval
    lines.append(f"four of five such runs take {low * 1e3:.1f} to {high * 1e3:.1f} ms; {_equals(plan)}")
    lines += [
        "",
        f"{'layer':<28} {'count':>5} {'compute ms':>10} {'collectives ms':>14} {'state GiB':>9} {'kept GiB':>8}",
    ]
    lines += [
        f"{r['layer']:<28} {r['count']:>5} {r['compute'] * 1e3:>10.3f} {r['collectives'] * 1e3:>14.3f} "
        f"{r['state'] / GiB:>9.3f} {r['kept'] / GiB:>8.3f}"
        for r in plan.layers()
    ]
    for c in plan.collectives():
        lines.append(
            f"  {c['module']} {c['value']}: {c['from']} -> {c['as']}, forward {c['forward'] or 'nothing'}, "
            f"backward {c['backward'] or 'nothing'}, {c['seconds'] * 1e3:.3f} ms"
        )
    lines += schedule_reasons(plan)
    lines += [f"padded: {text}" for text in paddings(p, plan.solution)]
    if not plan.unsupported and plan.microbatches > 1:
        lines.append(f"to run it: {_loop(plan)}")
    lines += [f"not returned: {name}: {why}" for name, why in plan.refused.items()]
    lines += [f"note: {n}" for n in p.notes] + [f"not executable yet: {u}" for u in plan.unsupported]
    return "\n".join(lines)


def who_runs(plan: Any) -> str:
    """Who runs the plan, in a word or two."""
    if plan.unsupported:
        return "no"
    if plan.name not in plan.searched.tried.passed:
        return "not tried"
    if plan.layout.pp > 1:
        return f"as stages, schedule of {plan.microbatches}"
    return "yes" if plan.microbatches == 1 else f"by accumulate, {plan.microbatches} parts"


def _equals(plan: Any) -> str:
    """Which other meshes the model cannot tell from the first, and the simplest of them."""
    equals = plan.equals
    if not equals:
        return "no other mesh above is within that"
    simplest = min([plan, *equals], key=lambda p: complexity(p.layout))
    which = "this plan is the simplest of them" if simplest is plan else f"the simplest of them is {simplest.name}"
    return f"{len(equals)} of the other meshes above are within that, {which}"


def complexity(layout: Any) -> tuple[int, ...]:
    """Layouts in the order of how much has to work together."""
    dimensions = sum(n > 1 for n in (layout.pp, layout.cp, layout.ep, layout.tp))
    return dimensions, layout.recompute != "none", layout.zero == "zero3", layout.pp, layout.tp


def _loop(plan: Any) -> str:
    """What the caller's loop does about microbatches."""
    if plan.layout.pp > 1:
        return (
            "stages = mindspeed_fx.pipeline_stages(...), and torch.distributed.pipelining's Schedule"
            f"{plan.schedule.partition(':')[0]} with {plan.microbatches} microbatches"
        )
    return (
        f"loss = mindspeed_fx.accumulate(step, *args, microbatches={plan.microbatches}) in your loop instead "
        "of "
        "step(*args) and loss.backward()"
    )
