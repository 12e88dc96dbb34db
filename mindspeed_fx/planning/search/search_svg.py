"""A picture of a searched plan: one of each kind of layer, modules colored by placement, collectives on the edges.

One self-contained HTML file with inline SVG; time goes down, and a row is as wide as its share of the modelled time.
"""

from __future__ import annotations

from typing import Any

from mindspeed_fx.planning.search.strategy_space import SUMMED, P, R
from mindspeed_fx.report import svg
from mindspeed_fx.report.html import Section, sections_page

ROW, WIDTH, LEFT = 26, 1080, 330
COLORS = {
    "whole": "#d9d9d9",
    "batch": "#8dd3c7",
    "sequence": "#80b1d3",
    "heads": "#fdb462",
    "experts": "#bc80bd",
    "width": "#fb8072",
}


def picture(plan: Any) -> str:
    """The page of a :class:`SearchedPlan`, of the parts that a graph's page has."""
    rows: list[tuple[str, str, str, float, list[str]]] = []
    problem, solution = plan.searched.problem, plan.solution
    moved: dict[Any, list[str]] = {}
    for move, p, t, seconds, _ in solution.moves:
        if seconds:
            forth, back = plan.collective_words(move, p, t)
            moved.setdefault(move.value.producer, []).append(
                f"{forth or 'nothing'} forward, {back or 'nothing'} backward: {seconds * 1e3:.2f} ms"
            )
    for run in [-1, *range(len(problem.runs))]:
        nodes = [n for n in problem.nodes if n.run == run]
        title = "around the layers" if run < 0 else f"{problem.runs[run][0]}, {len(problem.runs[run])} times"
        rows.append((title, "", "", 0.0, []))
        for n in nodes:
            price = solution.prices[n]
            rows.append(
                (
                    n.module or "(model)",
                    n.op + (f" ({price.how} over cp)" if price.how else ""),
                    _kind(plan, solution.strategies[n]),
                    price.forward + price.backward,
                    moved.get(n, []),
                )
            )
    slowest = max((r[3] for r in rows), default=1.0) or 1.0
    parts, y = [], 10
    for k, (word, color) in enumerate(COLORS.items()):
        parts += [svg.rect(10 + 110 * k, y, 14, 14, color), svg.text(30 + 110 * k, y + 11, word)]
    y += ROW
    for module, op, kind, seconds, words in rows:
        if op:
            width = max(4.0, (WIDTH - LEFT - 380) * seconds / slowest)
            title = f"{module} {op}: {kind}, {seconds * 1e3:.3f} ms"
            parts += [
                svg.text(20, y + 17, module),
                svg.rect(LEFT, y + 3, width, ROW - 6, COLORS[kind], title),
                svg.text(LEFT + width + 6, y + 17, f"{op}, {seconds * 1e3:.2f} ms"),
            ]
        else:
            parts.append(svg.text(10, y + 18, module, font_weight="bold", font_size=13))
        y += ROW
        for text in words:
            parts += [
                svg.element("path", d=f"M{LEFT - 12} {y - 6} v14 h10", stroke="#b2182b", fill="none"),
                svg.text(LEFT + 6, y + 13, text, "#b2182b"),
            ]
            y += ROW - 6
    plan_svg = svg.picture(WIDTH, y + 10, parts, f"Operators of the plan {plan.name} by time, and its messages")
    low, high = (seconds * 1e3 for seconds in plan.interval)
    return sections_page(
        plan.name,
        [
            f"Modelled: {plan.seconds * 1e3:.1f} ms a step ({low:.1f} to {high:.1f}), {plan.memory / 2**30:.1f} GiB a "
            "device. Bars: forward and backward of one operator on one rank; colours: what tp divides."
        ],
        [
            ("step ms", f"{plan.seconds * 1e3:.1f}"),
            ("GiB a device", f"{plan.memory / 2**30:.1f}"),
            ("mesh", ", ".join(f"{d} {n}" for d, n in plan.sizes.items())),
        ],
        [
            Section("operators", "Operators by time, and messages").picture(plan_svg),
            Section("numbers", "Numbers").code("As text", str(plan)),
            Section("plan", "Plan").code("As JSON, for plan files", plan.text(json_format=True)),
        ],
    )


def _kind(plan: Any, strategy: Any) -> str:
    labels = [x for x in (*strategy.outs, *strategy.ins) if x not in (R, P, SUMMED)]
    if not labels:
        return "whole"
    word = plan.searched.problem.label(labels[0])
    return word if word in COLORS else "width"
