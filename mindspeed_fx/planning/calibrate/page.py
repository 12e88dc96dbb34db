"""A calibration as text and as an HTML page: constants beside the documented ones, and every timing beside the fit."""

from __future__ import annotations

from mindspeed_fx.planning.calibrate import Calibration
from mindspeed_fx.planning.calibrate.fitting import spread_of_kind
from mindspeed_fx.report.html import Section, sections_page


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


def measured_shapes(result: Calibration) -> str:
    """How many kernels of the table correct the formulas."""
    return f"{len(result.table.measured)} measured products and attention kernels correct the formulas near them"


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
    lines += ["", measured_shapes(result)]
    lines += ["", f"saved in {result.path}; hardware is now {name}" if result.path else f"not saved: {name}"]
    return "\n".join(lines)


def html(result: Calibration) -> str:
    """One page without links to others."""
    lead = [
        f"{result.table.note}. In the cost model: {result.table.name}; what was not measured is {result.table.base}'s. "
        f"{measured_shapes(result)}."
    ]
    sections = [
        Section(name, title).table(rows[0], [row.values() for row in rows])
        for name, title, rows in (
            ("constants", "Constants", constants_of(result)),
            ("timings", "Timings", rows_of(result)),
        )
    ]
    facts = [("timings", len(rows_of(result))), ("constants", len(constants_of(result)))]
    return sections_page(f"mindspeed-fx calibrate: {result.table.device}", lead, facts, sections)
