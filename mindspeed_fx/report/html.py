"""Reports as self-contained HTML pages, from the templates in ``templates/``: no outside file, no network.

The page of a graph has its text in HTML and what is looked into (modules, roofline, memory, graphs, differences) as
compressed values that its script draws when they are asked for; d3 and dagre are inlined.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Iterable, Mapping, Sequence

from mindspeed_fx.cost.hardware import hardware
from mindspeed_fx.cost.training import modelled_step
from mindspeed_fx.report import measured, modelled
from mindspeed_fx.report.answers.base import Answer, Facts, mib, ms
from mindspeed_fx.report.diffs import is_changed, lowered_counts
from mindspeed_fx.report.gains import gains
from mindspeed_fx.report.measured import FAMILY_HEAD, KERNEL_HEAD, Measured
from mindspeed_fx.report.page_data import packed, page_data
from mindspeed_fx.report.records import GraphRecord

GAINS = 5
"""Changes that the top of a page lists."""


def graph_page(record: GraphRecord, values: Mapping[str, Any]) -> str:
    """The page of one graph.

    Args:
        values: its :func:`mindspeed_fx.report.metadata.metadata`.
    """
    numbered = list(enumerate(record.runs))
    shown = [(n, r) for n, r in numbered if r.report.rewrites or r.report.skipped or is_changed(r) or r.report.files]
    skipped = sum(len(r.report.skipped) for r in record.runs)
    cost = values["modelled"]
    return _render(
        "graph.html",
        title=f"mindspeed_fx: graph {record.index}",
        record=record,
        answer=_answer(cost),
        gains=[(f"{'at most ' * g.is_bound}{ms(g.seconds)}", g.what, g.reason) for g in gains([record])[:GAINS]],
        facts_of=[
            ("rewrites", sum(record.counts.values())),
            ("near misses", skipped),
            *((word, str(record.effective.get(word))) for word in ("target", "codegen", "level")),
        ],
        runs=shown,
        idle=[r for n, r in numbered if (n, r) not in shown],
        lowered=[(o, s, k, n, w) for (o, s, k, w), n in lowered_counts(record).items()],
        questions=_questions(record, values),
        plan=_file(record, "plan.svg"),
        plan_notes=[note for run in record.runs if run.report.name == "sharding.verify" for note in run.report.notes],
        measured=_measured(record.measured) if record.measured is not None else None,
        about=modelled.about(record) if record.calls else "",
        cost_head=modelled.HEAD,
        cost=[modelled.cells(r) for r in cost],
        times_from=modelled.times_from(cost),
        times=[(name, f"{seconds * 1e3:.1f}") for name, seconds in record.seconds.items()]
        + [(f"{r.report.name} ({r.stage})", f"{r.seconds * 1e3:.1f}") for r in record.runs],
        options=list(record.effective.items()),
        data=packed(page_data(record)),
    )


def index_page(graphs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The page that lists the graphs of a dump and in what the ranks differ.

    Args:
        graphs: folder below the dump's and the values of its metadata.json.
    """
    rows = [
        {
            "path": path,
            "target": values["effective"].get("target"),
            "level": values["effective"].get("level"),
            "rewrites": sum(values["counts"].values()),
            "skipped": sum(len(run["report"]["skipped"]) for run in values["runs"]),
            **{s: _microseconds(values["modelled"], s) for s in ("forward", "backward")},
            "peak": mib(values["memory"]["peak"]) if values.get("memory") else "",
            "sent": len((values.get("step") or {}).get("collectives", ())),
        }
        for path, values in graphs
    ]
    values = [v for _, v in graphs]
    return _render(
        "index.html",
        title="mindspeed_fx dump",
        graphs=rows,
        **_ranks(values),
    )


def _ranks(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the index says of ranks: what differs, rank by rank, and in what each differs from most others."""
    from mindspeed_fx.report.answers import ranks

    numbers = sorted({v["rank"] for v in values})
    table = ranks.properties(values) if len(numbers) > 1 else []
    different = [row for row in table if len(set(row.of.values())) > 1]
    facts = Facts({}, ranks=lambda: list(values))
    marked = lambda row: [(row.of[n], row.of[n] != row.most) for n in numbers]  # noqa: E731
    return {
        "ranks": numbers,
        "compared": len(table),
        "different": [(row.graph, row.what, marked(row)) for row in different],
        "equal": [(row.graph, row.what, row.most) for row in table if len(set(row.of.values())) == 1],
        "of_rank": [(n, ranks.rank(facts, str(n))) for n in numbers] if table else [],
    }


@dataclass
class Section:
    """One view of a page that needs no script of its own."""

    name: str
    """A word; what its button says."""
    title: str
    parts: list[tuple[str, Any]] = field(default_factory=list)
    """("text" or "head", words), ("table", (head, rows)), ("picture", SVG) or ("code", (words, text))."""

    def text(self, words: str) -> "Section":
        return self._add("text", words)

    def head(self, words: str) -> "Section":
        return self._add("head", words)

    def table(self, head: Iterable[str], rows: Iterable[Iterable[Any]]) -> "Section":
        return self._add("table", (list(head), [list(row) for row in rows]))

    def picture(self, svg: str) -> "Section":
        return self._add("picture", svg)

    def code(self, words: str, text: str) -> "Section":
        return self._add("code", (words, text))

    def _add(self, kind: str, content: Any) -> "Section":
        self.parts.append((kind, content))
        return self


def sections_page(
    title: str, lead: Sequence[str], facts: Sequence[tuple[str, Any]], sections: Sequence[Section]
) -> str:
    """A page of the same parts as a graph's: facts, and a view for each section.

    Args:
        lead: sentences under the title.
        facts: (words, value).
    """
    names = [section.name for section in sections]
    return _render("sections.html", title=title, lead=lead, facts_of=facts, sections=sections, names=names)


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table of plain values, as HTML."""
    return str(_environment().get_template("macros.html").module.table(list(head), [list(r) for r in rows]))


def _measured(values: Measured) -> dict[str, Any]:
    """What the page says of a measured step."""
    return {
        "head": measured.head(values),
        "steps": [measured.step_text(s) for s in values.steps],
        "families": measured.family_rows(values),
        "coverage": measured.coverage(values) if values.kernels else "",
        "kernels": measured.kernel_rows(values),
        "family_head": FAMILY_HEAD,
        "kernel_head": KERNEL_HEAD,
        "notes": values.notes,
    }


def _questions(record: GraphRecord, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ten questions with their answers; of a node the page's script answers."""
    from mindspeed_fx.report.answers.ask import QUESTIONS, ask
    from mindspeed_fx.report.answers.source import of_records

    (facts,) = of_records([record], known=[values])
    return [
        {
            "name": q.name,
            "title": q.words.format("...") if q.name == "node" else q.title(""),
            "answer": ask(facts, q.name) if q.name != "node" else Answer(()),
            "view": q.view,
        }
        for q in QUESTIONS
    ]


def _file(record: GraphRecord, name: str) -> str:
    """A file of the last pass that has one of that name; "" where none has."""
    return next((run.report.files[name] for run in reversed(record.runs) if name in run.report.files), "")


def _answer(cost: Sequence[Mapping[str, Any]]) -> str:
    """The forward before and after the passes, and the step with its interval and what the device's constants stand on,
    modelled; "" where nothing is modelled.
    """
    by_stage = {row["stage"]: row for row in cost}
    if not {"captured", "forward"} <= set(by_stage):
        return ""
    before, after = by_stage["captured"], by_stage["forward"]
    hw = hardware(after["hardware"])
    step = sum(by_stage[stage]["seconds"] for stage in ("forward", "backward") if stage in by_stage)
    return (
        f"Forward, modelled for {after['hardware']}: {before['seconds'] * 1e6:,.0f} us in {before['kernels']} kernels "
        f"before the passes, {after['seconds'] * 1e6:,.0f} us in {after['kernels']} after them. The step is "
        f"{modelled_step(hw, step)}; constants {hw.basis}."
    )


def _microseconds(rows: Sequence[Mapping[str, Any]], stage: str) -> str:
    return next((f"{r['seconds'] * 1e6:,.0f}" for r in rows if r["stage"] == stage), "")


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values) + "\n"


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    templates = resources.files("mindspeed_fx.report") / "templates"
    environment = Environment(loader=PackageLoader("mindspeed_fx.report"), autoescape=True, undefined=StrictUndefined)
    environment.globals["asset"] = lambda name: Markup((templates / name).read_text(encoding="utf-8"))
    return environment
