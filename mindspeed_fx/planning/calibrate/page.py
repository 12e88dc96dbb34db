"""A calibration as text and as an HTML page: constants beside the documented ones, and every timing beside the fit."""

from __future__ import annotations

from mindspeed_fx.planning.calibrate import Calibration
from mindspeed_fx.planning.calibrate.fitting import spread_of_kind

TEMPLATE = """<!doctype html>
<meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 14px/1.4 sans-serif; margin: 2em; max-width: 70em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .15em .8em; text-align: left }
tr:nth-child(even) { background: #f4f4f4 }
.bar { display: inline-block; height: .8em; background: #4878b0 } .low { background: #c05030 }
</style>
<h1>{{ title }}</h1>
<p>{{ note }}. In the cost model: <code>{{ name }}</code>; what was not measured is {{ base }}'s.</p>
{% for heading, table in tables %}
<h2>{{ heading }}</h2>
<table><tr>{% for column in table[0] %}<th>{{ column }}{% endfor %}</tr>
{% for row in table %}<tr>{% for column, value in row.items() %}<td>{{ value }}
{% if column == "error" %}<span class="bar{{ " low" if value[0] == "-" }}" style="width:{{ value[1:-1] }}px"></span>
{% endif %}{% endfor %}</tr>
{% endfor %}</table>
{% endfor %}
"""


def constants_of(result: Calibration) -> list[dict[str, str]]:
    """A row for each constant."""
    documented = result.base.constants()
    return [
        {
            "constant": path,
            "fitted": f"{float(c):.4g}",
            "unit": c.unit,
            "spread": f"{c.spread:.0%}" if c.spread else "",
            "documented": f"{float(documented[path]):.4g}" if path in documented else "",
        }
        for path, c in result.table.constants.items()
    ]


def rows_of(result: Calibration) -> list[dict[str, str]]:
    """A row for each timing."""
    rows = []
    for row in result.fit.rows:
        modelled = result.fit.modelled(row)
        rows.append(
            {
                "kind": row.kind,
                "what": row.label,
                "type": row.dtype,
                "stage": row.stage,
                "measured us": f"{row.seconds * 1e6:,.0f}",
                "spread": f"{row.spread:.0%}" + (" noisy" if row.is_noisy else ""),
                "modelled us": f"{modelled * 1e6:,.0f}",
                "error": f"{modelled / row.seconds - 1:+.0%}",
            }
        )
    return rows


def text(result: Calibration) -> str:
    """What the command prints."""
    spreads = spread_of_kind(list(result.fit.rows))
    lines = [f"{result.table.device}: {result.table.note}", "", f"{'kind':<12}{'timings':>8}{'spread':>8}{'error':>8}"]
    for kind in result.table.fitted:
        count = sum(r.kind == kind for r in result.fit.rows)
        lines.append(f"{kind:<12}{count:>8}{spreads[kind]:>8.0%}{result.fit.median_error(kind):>8.0%}")
    lines += ["", f"{'constant':<28}{'fitted':>12} {'unit':<8}{'spread':>7}{'documented':>12}"]
    lines += [
        f"{c['constant']:<28}{c['fitted']:>12} {c['unit']:<8}{c['spread']:>7}{c['documented']:>12}"
        for c in constants_of(result)
    ]
    name = result.table.name
    lines += ["", f"saved in {result.path}; hardware is now {name}" if result.path else f"not saved: {name}"]
    return "\n".join(lines)


def html(result: Calibration) -> str:
    """One page without links to others."""
    from jinja2 import Environment

    return (
        Environment(autoescape=True)
        .from_string(TEMPLATE)
        .render(
            title=f"mindspeed-fx calibrate: {result.table.device}",
            note=result.table.note,
            name=result.table.name,
            base=result.table.base,
            tables=[("Constants", constants_of(result)), ("Timings", rows_of(result))],
        )
    )
