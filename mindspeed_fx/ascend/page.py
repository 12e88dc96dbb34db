"""A :class:`CrossReport` as one self-contained HTML page, of the parts that a graph's page has."""

from __future__ import annotations

from typing import Any

from mindspeed_fx.ascend.text import milliseconds, size
from mindspeed_fx.report.html import Section, sections_page

OPERATORS = (
    "operator",
    "calls",
    "GFLOP",
    "bytes read and written",
    "memory of results",
    "modelled",
    "bound",
    "time from",
)
KERNELS = ("operator", "called", "kernel", "tile", "outcome", "on chip", "dynamic transfers", "scalar loops")


def page(report: Any) -> str:
    """The page: what became of the model, what was not lowered and why, every operator, and the code of every graph."""
    v = report.values
    facts = [
        ("SoC", report.soc),
        ("graphs", len(report.graphs)),
        ("parameters", f"{v['parameters'] / 1e6:,.1f} M"),
        ("rewrites", sum(report.counts.values())),
        ("lowered", sum(r["calls"] for r in report.lowered)),
        ("not lowered", sum(r["calls"] for r in report.unlowered)),
        ("torch", v["versions"]["torch"]),
        ("torch_npu", v["versions"]["torch_npu"]),
    ]
    sides = [_side(report, i, side) for i, graph in enumerate(report.graphs) for side in graph["sides"]]
    lead = [
        "Traced on fake NPU tensors and modelled; nothing ran on an NPU.",
        f"Times are those of {report.hardware}, {report.basis}.",
    ]
    sections = [_summary(report), _kernels(report), _triton(report), _rewrites(report), *sides]
    return sections_page(f"{v['model']} for {report.soc}", lead, facts, sections)


def _summary(report: Any) -> Section:
    section = Section("summary", "With and without the passes")
    if rows := report.comparison():
        section.table(("", "fused", "unfused"), rows)
        section.text(f"The step: {report.step()}, without the passes {report.step(True)}.")
    else:
        section.text(f"Not traced without the passes. The step: {report.step()}.")
    if report.without_gradient:
        section.head("Trainable parameters without a gradient")
        section.table(("parameter",), [(n,) for n in report.without_gradient])
    return section


def _kernels(report: Any) -> Section:
    section = Section("kernels", "Kernels").head("Not lowered")
    if report.unlowered:
        rows = [(r["operator"], r["side"], r["calls"], r["reason"]) for r in report.unlowered]
        section.table(("operator", "graph", "calls", "reason"), rows)
    else:
        section.text("Every fused operator has an NPU kernel.")
    rows = [(r["operator"], r["side"], r["calls"], r["kernel"], r["reason"]) for r in report.lowered]
    return section.head("Lowered").table(("operator", "graph", "calls", "kernel", "why not a better one"), rows)


def _rewrites(report: Any) -> Section:
    section = Section("rewrites", "Rewrites").table(("pass", "sites"), [(n, c) for n, c in report.counts.items() if c])
    if report.skipped:
        rows = [(s["pass"], s["reason"], s["module"], s["source"]) for s in report.skipped]
        section.head("Near misses").table(("pass", "reason", "module", "source"), rows)
    return section


def _side(report: Any, i: int, side: dict[str, Any]) -> Section:
    """Forward or backward of graph ``i``: its numbers, operators and code."""
    memory = side["memory"]
    name = side["side"] if len(report.graphs) == 1 else f"graph{i}-{side['side']}"
    rows = [
        (
            o["operator"],
            o["calls"],
            f"{o['flops'] / 1e9:,.3f}",
            size(o["bytes"]),
            size(o["made"]),
            milliseconds(o["seconds"]),
            o["bound"],
            o["timed"],
        )
        for o in side["operators"]
    ]
    return (
        Section(name, f"Graph {i}, {side['side']}")
        .text(
            f"{side['nodes']} nodes; modelled {milliseconds(side['cost']['seconds'])} on {report.hardware}; live "
            f"memory {size(memory['peak'])} at most, at {memory['node']}, of which inputs {size(memory['inputs'])}."
        )
        .table(OPERATORS, rows)
        .code("Code", side["code"])
    )


def _triton(report: Any) -> Section:
    result, section = report.values["kernels"], Section("triton", "Triton kernels")
    if result["problem"]:
        return section.text(f"Not compiled: {result['problem']}")
    section.text(
        f"Compiled for {report.soc} with bishengir-compile {result['compiler']}, up to the closed last stage; the tile "
        "is the best of those that were compiled."
    )
    return section.table(KERNELS, [_kernel(r) for r in report.kernels])


def _kernel(r: dict[str, Any]) -> tuple[Any, ...]:
    called = "by the graph" if r["in_graph"] else "no: generated" if r["generated"] else "no: torch_npu's is"
    if r["problem"]:
        return r["operator"], called, r["problem"]
    chip = ", ".join(f"{k} {size(v)}" for k, v in r["on_chip"].items())
    return (r["operator"], called, r["kernel"], str(r["tile"]), r["outcome"], chip, r["dynamic"], r["scalar_loops"])
