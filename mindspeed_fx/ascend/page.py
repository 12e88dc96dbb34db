"""A :class:`CrossReport` as one self-contained HTML page."""

from __future__ import annotations

from html import escape
from typing import Any

from mindspeed_fx.ascend.text import milliseconds, size
from mindspeed_fx.report.html import page as whole_page
from mindspeed_fx.report.html import table


def page(report: Any) -> str:
    """The page: what became of the model, what was not lowered and why, every operator, and the code of every graph."""
    v = report.values
    facts = [
        f"<b>{escape(report.soc)}</b>",
        f"<b>{len(report.graphs)}</b> graphs",
        f"<b>{v['parameters'] / 1e6:,.1f} M</b> parameters",
        f"<b>{sum(report.counts.values())}</b> rewrites",
        f"<b>{sum(r['calls'] for r in report.lowered)}</b> lowered, <b>{sum(r['calls'] for r in report.unlowered)}</b> "
        "not",
        f"torch <b>{escape(v['versions']['torch'])}</b>, torch_npu <b>{escape(v['versions']['torch_npu'])}</b>",
    ]
    body = [
        f"<h1>{escape(v['model'])} for {escape(report.soc)}</h1>",
        "<p>Traced on fake NPU tensors and modelled; nothing ran on an NPU.</p>",
        f'<ul class="facts">{"".join(f"<li>{f}</li>" for f in facts)}</ul>',
    ]
    if report.without_gradient:
        body += [
            "<h2>Trainable parameters without a gradient</h2>",
            table(("parameter",), [(n,) for n in report.without_gradient]),
        ]
    if rows := report.comparison():
        body += ["<h2>With and without the passes</h2>", table(("", "fused", "unfused"), rows)]
    body += [
        "<h2>Not lowered</h2>",
        table(
            ("operator", "graph", "calls", "reason"),
            [(r["operator"], r["side"], r["calls"], r["reason"]) for r in report.unlowered],
        )
        if report.unlowered
        else "<p>Every fused operator has an NPU kernel.</p>",
    ]
    body += [
        "<h2>Kernels</h2>",
        table(
            ("operator", "graph", "calls", "kernel", "why not a better one"),
            [(r["operator"], r["side"], r["calls"], r["kernel"], r["reason"]) for r in report.lowered],
        ),
    ]
    body += ["<h2>Triton kernels</h2>", _kernels(report)]
    body += ["<h2>Rewrites</h2>", table(("pass", "sites"), [(n, c) for n, c in report.counts.items() if c])]
    if report.skipped:
        body += [
            "<h2>Near misses</h2>",
            table(
                ("pass", "reason", "module", "source"),
                [(s["pass"], s["reason"], s["module"], s["source"]) for s in report.skipped],
            ),
        ]
    for i, graph in enumerate(report.graphs):
        for side in graph["sides"]:
            body += _side(report, i, side)
    return whole_page(f"{v['model']} for {report.soc}", "".join(body))


def _side(report: Any, i: int, side: dict[str, Any]) -> list[str]:
    """Forward or backward of graph ``i``: its numbers, operators and code."""
    memory = side["memory"]
    rows = [
        (
            o["operator"],
            o["calls"],
            f"{o['flops'] / 1e9:,.3f}",
            size(o["bytes"]),
            size(o["made"]),
            milliseconds(o["seconds"]),
            o["bound"],
        )
        for o in side["operators"]
    ]
    head = (
        "operator",
        "calls",
        "GFLOP",
        "bytes read and written",
        "memory of results",
        f"modelled on {report.hardware}",
        "bound",
    )
    return [
        f"<h2>Graph {i}, {side['side']}</h2><p>{side['nodes']} nodes; modelled "
        f"{milliseconds(side['cost']['seconds'])}; live memory {size(memory['peak'])} at most, at "
        f"<code>{escape(memory['node'])}</code>, of which inputs {size(memory['inputs'])}</p>",
        table(head, rows),
        '<details><summary>Code</summary><div class="wide"><pre '
        f'tabindex="0">{escape(side["code"])}</pre></div></details>',
    ]


def _kernels(report: Any) -> str:
    result = report.values["kernels"]
    if result["problem"]:
        return f"<p>Not compiled: {escape(result['problem'])}</p>"
    called = lambda r: "by the graph" if r["in_graph"] else "no: generated" if r["generated"] else "no: torch_npu's is"  # noqa: E731
    head = ("operator", "called", "kernel", "tile", "outcome", "on chip", "dynamic transfers", "scalar loops")
    rows = [
        (r["operator"], called(r), r["problem"])
        if r["problem"]
        else (
            r["operator"],
            called(r),
            r["kernel"],
            str(r["tile"]),
            r["outcome"],
            ", ".join(f"{k} {size(v)}" for k, v in r["on_chip"].items()),
            r["dynamic"],
            r["scalar_loops"],
        )
        for r in report.kernels
    ]
    return (
        f"<p>Compiled for {escape(report.soc)} with bishengir-compile {escape(result['compiler'])}, up to the closed "
        "last stage; the tile is the best of those that were compiled.</p>" + table(head, rows)
    )
