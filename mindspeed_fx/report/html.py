"""The report of a graph as one self-contained HTML page: no script, no outside file, readable on a phone."""

from __future__ import annotations

from html import escape
from typing import Any, Iterable

from mindspeed_fx.report import modelled
from mindspeed_fx.report.diffs import diff_text, is_changed, lowered_counts
from mindspeed_fx.report.records import GraphRecord, PassRun

_STYLE = """
:root { color-scheme: light dark;
  --line: light-dark(#d0d7de, #3d444d); --soft: light-dark(#f6f8fa, #161b22); --bar: light-dark(#0969da, #58a6ff);
  --add: light-dark(#dafbe1, #12361f); --del: light-dark(#ffebe9, #4a1f1d);
  --text: light-dark(#1f2328, #e6edf3); --back: light-dark(#fff, #0d1117); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 72rem;
  font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { background: var(--soft); white-space: nowrap; }
td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
pre { margin: 0; padding: .6rem; font: 12.5px/1.45 ui-monospace, monospace; overflow-x: auto; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
pre span { display: block; min-width: max-content; }
.add { background: var(--add); } .del { background: var(--del); } .at { opacity: .65; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; }
summary { padding: .5rem .7rem; cursor: pointer; background: var(--soft); border-radius: 6px; }
details > div { padding: .6rem; }
.bar { background: var(--bar); height: .7rem; border-radius: 3px; min-width: 2px; } .muted { opacity: .7; }
.bars { width: 45%; } @media (max-width: 600px) { .bars { display: none; } }
.facts { display: flex; flex-wrap: wrap; gap: .5rem; padding: 0; list-style: none; }
.facts li { border: 1px solid var(--line); border-radius: 6px; padding: .3rem .7rem; }
"""


def graph_page(record: GraphRecord) -> str:
    """The page of one graph."""
    facts = [
        f"<b>{sum(record.counts.values())}</b> rewrites",
        f"<b>{len(record.runs)}</b> passes run",
        f"target <b>{escape(str(record.effective.get('target')))}</b>",
        f"codegen <b>{escape(str(record.effective.get('codegen')))}</b>",
        f"level <b>{escape(str(record.effective.get('level')))}</b>",
    ]
    body = [
        f"<h1>Graph {record.index}, rank {record.rank}</h1>",
        f'<ul class="facts">{"".join(f"<li>{f}</li>" for f in facts)}</ul>',
        "<h2>Times</h2>",
        _times(record),
        "<h2>Passes</h2>",
        "<p>Open a pass for its sites, its near misses and the difference it made.</p>",
        *(_pass(n, r) for n, r in enumerate(record.runs)),
    ]
    if record.lowered:
        rows = [(o, s, k, str(n), w) for (o, s, k, w), n in lowered_counts(record).items()]
        body += ["<h2>Kernels</h2>", table(("operator", "graph", "kernel", "calls", "why not a better one"), rows)]
    if record.calls:
        cost = [modelled.cells(r) for r in modelled.modelled_rows(record)]
        body += [
            "<h2>Modelled cost</h2>",
            f"<p>{escape(modelled.about(record))}.</p>",
            table(modelled.HEAD, cost) if cost else "",
        ]
    body += [
        "<h2>Effective options</h2>",
        table(("option", "value"), [(k, str(v)) for k, v in record.effective.items()]),
    ]
    return page(f"mindspeed_fx: graph {record.index}", "".join(body))


def index_page(graphs: Iterable[str]) -> str:
    """The page that lists the graphs of a dump."""
    links = "".join(f'<li><a href="{escape(g)}/report.html">{escape(g)}</a></li>' for g in graphs)
    return page("mindspeed_fx dump", f"<h1>mindspeed_fx dump</h1><ul>{links}</ul>")


def page(title: str, body: str) -> str:
    """A whole page around ``body``, which is HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _pass(number: int, run: PassRun) -> str:
    report, parts = run.report, [f"<p>{escape(n)}</p>" for n in run.report.notes]
    parts += [f'<div class="wide">{text}</div>' for name, text in report.files.items() if name.endswith(".svg")]
    if report.rewrites:
        parts.append(
            table(("operator", "module", "source"), [(s.operator, s.module, s.source) for s in report.rewrites])
        )
    if report.skipped:
        parts += [
            "<p><b>Near misses</b></p>",
            table(("reason", "module", "source"), [(s.reason, s.module, s.source) for s in report.skipped]),
        ]
    if run.check:
        parts.append(f"<p>Check: {escape(run.check)}</p>")
    if is_changed(run):
        parts += ["<p><b>Difference</b></p>", _diff(diff_text(run))]
    inside = "".join(parts) or '<p class="muted">Nothing to rewrite in this graph.</p>'
    head = (
        f"<b>{escape(report.name)}</b> <span class=muted>{escape(run.stage)}</span>: {len(report.rewrites)} "
        f"rewritten, {len(report.skipped)} near misses, nodes {run.nodes_before} → {run.nodes_after}, "
        f"{run.seconds * 1e3:.1f} ms"
    )
    return f"<details><summary>{number:02d} {head}</summary><div>{inside}</div></details>"


def _diff(text: str) -> str:
    kinds = {"+": "add", "-": "del", "@": "at"}
    lines = "".join(
        f'<span class="{kinds.get(line[:1], "")}">{escape(line) or " "}</span>' for line in text.splitlines()
    )
    return f'<div class="wide"><pre tabindex="0">{lines}</pre></div>'


def _times(record: GraphRecord) -> str:
    rows = [(k, v) for k, v in record.seconds.items()] + [
        (f"{r.report.name} ({r.stage})", r.seconds) for r in record.runs
    ]
    longest = max((v for _, v in rows), default=1.0) or 1.0
    cells = "".join(
        f'<tr><td>{escape(k)}</td><td class="n">{v * 1e3:.1f} ms</td><td class="bars"><div class="bar" '
        f'style="width:{100 * v / longest:.1f}%"></div></td></tr>'
        for k, v in rows
    )
    return f'<div class="wide"><table><tbody>{cells}</tbody></table></div>'


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """A table of plain values."""
    cells = "".join("<tr>" + "".join(f"<td><code>{escape(str(c))}</code></td>" for c in row) + "</tr>" for row in rows)
    heads = "".join(f"<th>{escape(h)}</th>" for h in head)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{cells}</tbody></table></div>'
