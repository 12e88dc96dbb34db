"""A picture of a searched plan: one of each kind of layer, modules colored by placement, collectives on the edges.

One self-contained HTML file with inline SVG; time goes down, and a row is as wide as its share of the modelled time.
"""

from __future__ import annotations

import html
from typing import Any

from mindspeed_fx.planning.search.strategy_space import SUMMED, P, R

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
    """The page of a :class:`SearchedPlan`."""
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
    body, y = [], 10
    for module, op, kind, seconds, words in rows:
        if not op:
            body.append(f'<text x="10" y="{y + 18}" class="head">{html.escape(module)}</text>')
        else:
            width = max(4, (WIDTH - LEFT - 380) * seconds / slowest)
            body.append(
                f'<text x="20" y="{y + 17}">{html.escape(module)}</text><rect x="{LEFT}" y="{y + 3}" '
                f'width="{width:.1f}" height="{ROW - 6}" '
                f'fill="{COLORS[kind]}">'
                f"<title>{html.escape(f'{module} {op}: {kind}, {seconds * 1e3:.3f} ms')}</title></rect>"
            )
            body.append(
                f'<text x="{LEFT + width + 6:.1f}" y="{y + 17}">{html.escape(op)}, {seconds * 1e3:.2f} ms</text>'
            )
        y += ROW
        for text in words:
            body.append(
                f'<path d="M{LEFT - 12} {y - 6} v14 h10" class="edge"/><text x="{LEFT + 6}" y="{y + 13}" '
                f'class="move">{html.escape(text)}</text>'
            )
            y += ROW - 6
    legend = "".join(f'<span style="background:{c}">{k}</span>' for k, c in COLORS.items())
    return f"""<!doctype html><meta charset="utf-8"><title>plan {html.escape(plan.name)}</title>
<style>
body{{font:14px sans-serif;margin:24px}}
text{{font-size:12px}}
.head{{font-weight:bold;font-size:14px}}
.move{{fill:#b2182b}}
.edge{{stroke:#b2182b;fill:none}}
span{{padding:3px 10px;margin-right:6px}}
pre{{background:#f4f4f4;padding:12px;overflow:auto}}
</style>
<h1>{html.escape(plan.name)}</h1>
<p>Modelled: {plan.seconds * 1e3:.1f} ms a step ({plan.interval[0] * 1e3:.1f} to {plan.interval[1] * 1e3:.1f}),
{plan.memory / 2**30:.1f} GiB a device.
Bars: forward and backward of one operator on one rank; colors: what tp divides.</p>
<p>{legend}</p>
<svg width="{WIDTH}" height="{y + 10}" xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>
<h2>Numbers</h2><pre>{html.escape(str(plan))}</pre>
<h2>Plan</h2><pre>{html.escape(plan.text(json_format=True))}</pre>
"""


def _kind(plan: Any, strategy: Any) -> str:
    labels = [x for x in (*strategy.outs, *strategy.ins) if x not in (R, P, SUMMED)]
    if not labels:
        return "whole"
    word = plan.searched.problem.label(labels[0])
    return word if word in COLORS else "width"
