"""What the ranks of a dump do differently: passes, collectives, bytes, times, graphs, options."""

from __future__ import annotations

from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from mindspeed_fx.errors import OptionError
from mindspeed_fx.report.answers.base import Answer, Facts, mib, ms, plural


def rank(facts: Facts, value: str) -> Answer:
    """What one rank does differently from most of the others; of no rank in particular where none is named."""
    rows = facts.ranks() or [facts.values]
    numbers = sorted({v["rank"] for v in rows})
    if value and (not value.isdigit() or int(value) not in numbers):
        raise OptionError(f"rank: {value!r}; this dump has {', '.join(map(str, numbers))}")
    if len(numbers) == 1:
        return Answer((f"one rank wrote this dump, rank {numbers[0]}; the others have their own, or there are none",))
    table = properties(rows)
    if not value:
        different = [row for row in table if len(set(row.of.values())) > 1]
        lines = (f"{plural(len(different), 'thing')} of {len(table)} differ between {len(numbers)} ranks",)
        return Answer(
            lines, ("graph", "what", *(f"rank {n}" for n in numbers)), [_row(row, numbers) for row in different]
        )
    mine = int(value)
    results = []
    for row in table:
        others = Counter(text for n, text in row.of.items() if n != mine)
        most = others.most_common(1)[0][0] if others else ""
        if row.of.get(mine, "") != most:
            results.append((row.graph, row.what, row.of.get(mine, "-"), _said(row, mine)))
    head = ("graph", "what", f"rank {mine}", "the others")
    if not results:
        return Answer(
            (f"nothing: rank {mine} does what most of the other {len(numbers) - 1} do, in {len(table)} things",)
        )
    return Answer((f"rank {mine} differs in {plural(len(results), 'thing')} of {len(table)}",), head, results)


class Property:
    """One thing that ranks may differ in: ``of`` is rank -> its text."""

    def __init__(self, graph: str, what: str, of: Mapping[int, str]):
        self.graph, self.what, self.of = graph, what, of

    @property
    def most(self) -> str:
        """The text that most ranks have."""
        return Counter(self.of.values()).most_common(1)[0][0]


def properties(rows: Iterable[Mapping[str, Any]]) -> list[Property]:
    """Everything that is compared, in the order of the graphs.

    Args:
        rows: metadata of every graph of every rank.
    """
    graphs: dict[int, dict[int, Mapping[str, Any]]] = {}
    ranks: set[int] = set()
    for values in rows:
        graphs.setdefault(values["index"], {})[values["rank"]] = values
        ranks.add(values["rank"])
    results = [Property("all", "graphs", {r: str(sum(r in g for g in graphs.values())) for r in ranks})]
    for index, by_rank in sorted(graphs.items()):
        texts = {r: dict(_texts(by_rank[r])) if r in by_rank else {"graph": "not there"} for r in sorted(ranks)}
        for what in dict.fromkeys(w for t in texts.values() for w in t):
            results.append(Property(str(index), what, {r: t.get(what, "0") for r, t in texts.items()}))
    return results


def _texts(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What is compared of one graph, as (what, text)."""
    for name, option in values["effective"].items():
        if name not in ("dump", "passes"):
            yield f"option {name}", str(option)
    yield "passes in force", str(len(values["effective"].get("passes", ())))
    for name, count in values["counts"].items():
        yield f"rewrites of {name}", str(count)
    left = Counter(run["report"]["name"] for run in values["runs"] for _ in run["report"]["skipped"])
    for name, count in left.items():
        yield f"near misses of {name}", str(count)
    for row in values["modelled"]:
        yield f"{row['stage']}: kernels", str(row["kernels"])
        yield f"{row['stage']}: read and written", mib(row["bytes"])
        yield f"{row['stage']}: modelled", ms(row["seconds"])
    yield from _sent(values.get("step") or {})
    if memory := values.get("memory"):
        yield "peak", mib(memory["peak"])
        yield (
            "parameters, buffers and inputs",
            mib(memory["given"].get("trainable", 0) + memory["given"].get("other", 0)),
        )
    for row, count in Counter((r["operator"], r["side"], r["kernel"]) for r in values["lowered"]).items():
        yield f"{row[0]} in the {row[1]} by {row[2]}", str(count)


def _sent(step: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for s in step.get("collectives", ()):
        groups.setdefault(f"{s['kind']} over {s['link']} in the {s['graph']}", []).append(s)
    for name, rows in groups.items():
        yield name, f"{len(rows)}, {mib(sum(s['bytes'] for s in rows))}"
    if step.get("collectives"):
        yield "exposed communication", ms(step["exposed_seconds"])


def _said(row: Property, mine: int) -> str:
    """What the others say, with the ranks where they do not agree."""
    texts: dict[str, list[int]] = {}
    for n, text in sorted(row.of.items()):
        if n != mine:
            texts.setdefault(text, []).append(n)
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{text} (rank {', '.join(map(str, who))})" for text, who in texts.items())


def _row(row: Property, numbers: Sequence[int]) -> tuple[str, ...]:
    return (row.graph, row.what, *(row.of.get(n, "-") for n in numbers))
